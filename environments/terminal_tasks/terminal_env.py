"""`terminal_tasks` as an environment: shell and file tasks without end, checked in a fork of the workspace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from agent_loop.model.contract import Message
from environments.base import (
    AgentResult,
    HermesAgentBaseEnv,
    HermesAgentEnvConfig,
    SandboxContext,
    ToolContext,
    Verdict,
)
from environments.terminal_tasks import TerminalTask, TerminalTasks, task_from_id
from environments.terminal_tasks.checks import FileIs, Missing

LEVELS = range(5)


class TerminalTasksConfig(HermesAgentEnvConfig):
    """Which tasks, and how they are put to the model."""

    levels: list[int] = Field(default_factory=list, description="0 (one short command) to 4; empty means all.")
    categories: list[str] = Field(default_factory=list, description="Empty means all.")
    kinds: list[str] = Field(default_factory=list, description="Empty means all.")
    split: Literal["train", "eval"] = "train"
    examples: list[Message] = Field(
        default_factory=list, description="Messages before the task: few-shot turns for small models."
    )
    system_prompt: str | None = (
        "You solve tasks in a Linux shell. Use the tools to do the work, then say briefly what you did."
    )
    max_agent_turns: int = Field(default=12, ge=1)
    partial_credit: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="What a training task that is not solved can earn at most: its commands are compared with the "
        "oracle's, word by word. For models that solve some kinds never by luck. Evaluation gives none.",
    )

    @model_validator(mode="after")
    def _there_are_such_tasks(self) -> TerminalTasksConfig:
        if wrong := [level for level in self.levels if level not in LEVELS]:
            raise ValueError(f"there is no level {wrong[0]}: levels are {LEVELS[0]} to {LEVELS[-1]}")
        TerminalTasks(self.split, levels=self.levels, categories=self.categories, kinds=self.kinds)
        return self


def commands(result: AgentResult) -> list[str]:
    """What the agent had the terminal run."""
    calls = (call.arguments or {} for call in result.tool_calls if call.name == "terminal")
    return [command for call in calls if isinstance(command := call.get("command"), str)]


def likeness(solution: Sequence[str], tried: Sequence[str]) -> float:
    """Words that both have, over the words of both (F1): 1 for the same words, 0 for none."""
    wanted, found = Counter(" ".join(solution).split()), Counter(" ".join(tried).split())
    return 2 * (wanted & found).total() / max(1, wanted.total() + found.total())


class TerminalTasksEnv(HermesAgentBaseEnv):
    """Shell and file tasks with deterministic verifiers."""

    name = "terminal_tasks"
    env_config_cls = TerminalTasksConfig
    config: TerminalTasksConfig

    async def setup(self) -> None:
        """Choose the tasks; training goes on from where a checkpoint left it."""
        self.tasks = self._stream(self.config.split)
        self.next_task = getattr(self, "next_task", 0)

    async def get_next_item(self) -> TerminalTask:
        """The next task of the stream, which has no end."""
        self.next_task += 1
        return self.tasks[self.next_task - 1]

    async def evaluation_items(self) -> Sequence[TerminalTask]:
        """The first tasks of the evaluation split: always the same ones."""
        held_out = self._stream("eval")
        return [held_out[index] for index in range(self.config.eval_items)]

    async def prepare(self, item: TerminalTask, ctx: SandboxContext) -> None:
        await item.prepare(ctx)

    def format_prompt(self, item: TerminalTask) -> list[Message]:
        return [*self.config.examples, {"role": "user", "content": item.prompt}]

    async def compute_reward(self, item: TerminalTask, result: AgentResult, ctx: ToolContext) -> Verdict:
        """What the files say, not what the agent says; partial credit alone looks at the commands."""
        verdict = await item.verify(ctx)
        if verdict.failures and self.config.partial_credit and item.split == "train":
            return replace(verdict, score=self.config.partial_credit * likeness(item.solution, commands(result)))
        return verdict

    def impossible(self, item: TerminalTask) -> TerminalTask:
        """A file that must hold a text and must not be there."""
        contradiction = (FileIs("answer.check", "done"), Missing("answer.check"))
        return replace(item, checks=(*item.checks, *contradiction))

    def item_to_json(self, item: TerminalTask) -> str:
        return item.id

    def item_from_json(self, data: str) -> TerminalTask:
        return task_from_id(data)

    def checkpoint_state(self) -> dict[str, Any]:
        """Where in the stream training is."""
        return {"next_task": self.next_task}

    def restore_checkpoint(self, state: dict[str, Any]) -> None:
        self.next_task = int(state["next_task"])

    def _stream(self, split: str) -> TerminalTasks:
        config = self.config
        return TerminalTasks(
            split, levels=config.levels, categories=config.categories, kinds=config.kinds, seed=config.seed
        )
