"""Evaluation during training: the same rollouts on the evaluation items, summed up into metrics of the step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_loop.records.record import RolloutRecord

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv
    from environments.rollouts.rollouts import GroupResult
    from environments.runs.summary import Summary

log = logging.getLogger(__name__)


async def evaluation_rollouts(
    env: HermesAgentBaseEnv, items: Sequence[Any], tag: str, on_group: Callable[[GroupResult], None] = lambda _: None
) -> list[RolloutRecord]:
    """Roll out each item `eval_samples` times; the records in the order of the items."""
    at_once = asyncio.Semaphore(max(1, env.config.max_eval_workers // env.config.eval_samples))

    async def run(index: int, item: Any) -> list[RolloutRecord]:
        async with at_once:
            group = await env.rollouts.run_group(item, index, env.config.eval_samples, env.config.eval_temperature, tag)
            on_group(group)
            return list(group.records())

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run(index, item)) for index, item in enumerate(items)]
    return [record for task in tasks for record in task.result()]


async def evaluate_here(env: HermesAgentBaseEnv) -> Summary | None:
    """Run the environment's evaluation items while it serves; metrics go to the log of the step."""
    from environments.runs.summary import summarize, summary_figures

    items = await env.chosen_evaluation_items()
    if not items:
        log.info("%s has no evaluation items", env.name)
        return None
    step = env.curr_step
    records = await evaluation_rollouts(env, items, f"eval{step}")
    summary = summarize(records)
    if env.config.data_dir_to_save_evals is not None:
        await asyncio.to_thread(store_records, Path(env.config.data_dir_to_save_evals) / f"step-{step}.jsonl", records)
    await env.wandb_log(summary_figures(summary, "eval"))
    return summary


def store_records(path: Path, records: Sequence[RolloutRecord]) -> None:
    """A rollouts.jsonl at this path. Blocking."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(record.to_json() + b"\n" for record in records))
