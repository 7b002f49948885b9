"""Evaluation of a run: held-out tasks, always the same ones, sampled through the front's evaluation lane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.backends.base import GROUP
from environments.base import HermesAgentBaseEnv
from environments.env_config import RunConfig, ServerConfig
from environments.evaluation import evaluation_rollouts, store_records
from environments.group_runner import GroupResult
from environments.learn.figures import evaluation_figures
from environments.planning import item_field
from environments.runs.batch import opened

GROUPS_AT_ONCE = 3
"""One is sampled while another's tools run and a third is being verified."""

Progress = Callable[[int, int], None]


@dataclass
class Evaluator:
    """The environment of the evaluation, and its items."""

    env: HermesAgentBaseEnv
    items: Sequence[Any]
    kinds: dict[str, str]

    async def run(self, step: int, path: Path, progress: Progress) -> dict[str, Any]:
        """Roll out, store the records, and sum up; `progress` hears of each finished task."""
        began, done = time.monotonic(), 0

        def on_group(_group: GroupResult) -> None:
            nonlocal done
            done += 1
            progress(done, len(self.items))

        records = await evaluation_rollouts(self.env, self.items, f"eval{step}", on_group)
        await asyncio.to_thread(store_records, path, records)
        figures = evaluation_figures(records, self.kinds)
        return {"event": "evaluation", "step": step, **figures, "duration_s": time.monotonic() - began}


@asynccontextmanager
async def open_evaluator(
    kind: type[HermesAgentBaseEnv], config: RunConfig, server: ServerConfig
) -> AsyncIterator[Evaluator]:
    """An environment of its own beside the one that trains, with a pool of its own."""
    samples = config.learn.eval_samples or config.env.eval_samples
    settings = config.env.model_copy(
        update={
            "eval_items": config.learn.eval_items or config.env.eval_items,
            "eval_samples": samples,
            "max_eval_workers": GROUPS_AT_ONCE * samples,
            "extra_body": {**(config.env.extra_body or {}), GROUP: samples},
        }
    )
    env = kind(settings, [server])
    async with opened(env, "evaluate"):
        items = list(await env.evaluation_items())
        kinds = {env.item_id(item): str(item_field(item, "kind") or env.category(item) or "all") for item in items}
        yield Evaluator(env, items, kinds)
