"""`process` and `evaluate` of an environment: groups side by side, stored, resumed, summed up.

A run directory holds `rollouts.jsonl` (for `verify` and `view`), `sft.jsonl`, `summary.json` and the config it was made
with, secrets masked.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.atropos.stops import Stop
from environments.config import masked
from environments.runs.progress import Tally, progress_for
from environments.runs.runner import Work, run_all
from environments.runs.sft import export_sft
from environments.runs.store import RunStore
from environments.summary import Summary, summarize
from environments.summary_text import print_summary

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv
    from environments.group_runner import GroupResult

log = logging.getLogger(__name__)

IGNORED_ON_RESUME = frozenset({"groups_at_once", "total_steps", "eval_items", "run_dir", "pool", "drain_timeout_s"})
"""Settings that may change between two starts of a run without making it another run."""


async def process_run(env: HermesAgentBaseEnv, out: Path | None = None, fresh: bool = False) -> int:
    """Run `total_steps` groups of training items; exit code 1 when a group could not be completed."""
    total = env.config.total_steps

    async def items() -> AsyncIterator[Work]:
        for index in range(total):
            item = await env.get_next_item()
            if item is None:
                log.info("no more items after %d", index)
                return
            yield Work(index, env.item_id(item), item)

    async def run(work: Work) -> GroupResult:
        return await env.run_group(work.item, work.index, env.config.group_size)

    async with opened(env, "process"):
        return await _run(env, items(), total, run, out or _directory(env, ""), fresh)


async def evaluate_run(env: HermesAgentBaseEnv, out: Path | None = None, fresh: bool = False) -> int:
    """Run the evaluation items, `eval_samples` rollouts each."""
    async with opened(env, "evaluate"):
        items = list(await env.evaluation_items())
        if not items:
            log.error("%s has no evaluation items: write `evaluation_items`", env.name)
            return 1

        async def works() -> AsyncIterator[Work]:
            for index, item in enumerate(items):
                yield Work(index, env.item_id(item), item)

        async def run(work: Work) -> GroupResult:
            return await env.run_group(work.item, work.index, env.config.eval_samples, env.config.eval_temperature)

        return await _run(env, works(), len(items), run, out or _directory(env, "-eval"), fresh)


async def _run(
    env: HermesAgentBaseEnv, works: AsyncIterator[Work], total: int, run: Any, directory: Path, fresh: bool
) -> int:
    stop = Stop()
    with stop.on_signals(), RunStore(directory, _identity(env), resume=not fresh) as store, progress_for() as progress:
        tally = await run_all(works, total, run, store, progress, stop, env.config.groups_at_once)
        summary = finish(env, store, tally)
    print_summary(summary)
    if stop.draining.is_set():
        log.warning("stopped after %d of %d groups; the same command goes on from there", tally.done, tally.total)
    return 0 if tally.done == tally.total else 1


def finish(env: HermesAgentBaseEnv, store: RunStore, tally: Tally) -> Summary:
    """Export, sum up, and say where everything is."""
    examples = export_sft(store.records(), store.directory / "sft.jsonl", env.config.rewards.solved_at)
    summary = summarize(store.records())
    (store.directory / "summary.json").write_bytes(summary.to_json())
    log.info("%s; %d SFT examples; %s", tally.line(), examples, store.rollouts_path)
    return summary


@asynccontextmanager
async def opened(env: HermesAgentBaseEnv, mode: str) -> AsyncIterator[None]:
    """Pool and model open, items ready; closed however the block ends."""
    env.mode = mode
    try:
        await env.open_up()
        await env.setup()
        yield
    finally:
        await env.shut_down()


def _directory(env: HermesAgentBaseEnv, suffix: str) -> Path:
    return env.config.run_dir or Path("runs") / f"{env.name}{suffix}"


def _identity(env: HermesAgentBaseEnv) -> dict[str, Any]:
    """What makes two starts the same run: the settings, but not how fast or how far to go."""
    settings = {key: value for key, value in masked(env.config).items() if key not in IGNORED_ON_RESUME}
    servers: Sequence[Any] = env.server_configs
    return {"environment": env.name, "env": settings, "openai": [masked(server) for server in servers]}
