"""`process` and `evaluate` of an environment: groups side by side, stored, resumed, summed up.

A run directory holds `rollouts.jsonl` (for `verify` and `view`), `sft.jsonl`, `summary.json` and the config it was made
with, secrets masked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agent_loop.records.record import RolloutRecord
from environments.atropos.stops import Stop
from environments.config.loader import masked
from environments.errors import ConfigError, RunFailed
from environments.rollouts.rollouts import GroupResult, Rollouts
from environments.runs.progress import Progress, Tally, progress_for
from environments.runs.store import RunDiffers, RunStore, export_sft, write_whole
from environments.runs.summary import Summary, print_summary, summarize

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv

log = logging.getLogger(__name__)


class GroupOutcome(Protocol):
    """What running one item gives."""

    @property
    def complete(self) -> bool:
        """Whether the group has as many trainable rollouts as it should."""

    def records(self) -> Sequence[RolloutRecord]:
        """Every rollout of the group, those that infrastructure ended too."""


@dataclass(frozen=True)
class Work:
    """One item with its place in the run."""

    index: int
    item_id: str
    item: Any


RunGroup = Callable[[Work], Awaitable[GroupOutcome]]


async def run_all(
    work: AsyncIterator[Work], total: int, run: RunGroup, store: RunStore, progress: Progress, stop: Stop, at_once: int
) -> Tally:
    """Run what is not finished yet, `at_once` groups side by side. On a stop: start nothing new, finish what runs."""
    tally = Tally(total, done=len(store.finished), resumed=len(store.finished))
    progress.show(tally)
    running: set[asyncio.Task[None]] = set()
    stopping = asyncio.create_task(stop.now.wait())
    try:
        async for piece in work:
            if piece.index in store.finished:
                _check_same(store, piece)
                continue
            while len(running) >= at_once and not stop.draining.is_set():
                running = await _after_one(running, stopping)
            if stop.draining.is_set():
                break
            running.add(asyncio.create_task(_run_one(piece, run, store, progress, tally)))
        while running and not stop.now.is_set():
            running = await _after_one(running, stopping)
    finally:
        stopping.cancel()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return tally


async def _after_one(running: set[asyncio.Task[None]], stopping: asyncio.Task[Any]) -> set[asyncio.Task[None]]:
    await asyncio.wait({*running, stopping}, return_when="FIRST_COMPLETED")
    for task in [task for task in running if task.done()]:
        running.discard(task)
        task.result()
    return running


async def _run_one(piece: Work, run: RunGroup, store: RunStore, progress: Progress, tally: Tally) -> None:
    outcome = await run(piece)
    records = outcome.records()
    await asyncio.to_thread(store.add_group, piece.index, piece.item_id, records, outcome.complete)
    tally.done += outcome.complete
    tally.dropped += not outcome.complete
    scored = [record.score for record in records if record.trainable and record.score is not None]
    tally.rollouts += len(scored)
    tally.score_sum += sum(scored)
    tally.lost += sum(not record.trainable for record in records)
    progress.show(tally)


def _check_same(store: RunStore, piece: Work) -> None:
    stored = store.finished[piece.index]
    if stored != piece.item_id:
        raise RunDiffers(
            f"group {piece.index} of {store.directory} was item {stored}, now it is {piece.item_id}: use --fresh"
        )


IGNORED_ON_RESUME = frozenset({"groups_at_once", "total_steps", "eval_items", "run_dir", "pool", "drain_timeout_s"})
"""Settings that may change between two starts of a run without making it another run."""


async def process_run(env: HermesAgentBaseEnv, out: Path | None = None, fresh: bool = False) -> int:
    """Run `total_steps` groups of training items; exit code 1 when a group could not be completed."""
    total = env.config.total_steps
    if total < 1:
        raise ConfigError(f"env.total_steps is {total}: process needs to know how many groups to make, at least 1")

    async def items() -> AsyncIterator[Work]:
        for index in range(total):
            item = await env.get_next_item()
            if item is None:
                log.info("no more items after %d", index)
                return
            yield Work(index, env.item_id(item), item)

    async def run(work: Work) -> GroupResult:
        return await env.rollouts.run_group(work.item, work.index, env.config.group_size)

    with _store(env, "process", out or _directory(env, ""), fresh) as store:
        async with Rollouts(env, mode="process"):
            return await _run(env, items(), total, run, store)


async def evaluate_run(env: HermesAgentBaseEnv, out: Path | None = None, fresh: bool = False) -> int:
    """Run the evaluation items, `eval_samples` rollouts each."""
    with _store(env, "evaluate", out or _directory(env, "-eval"), fresh) as store:
        async with Rollouts(env, mode="evaluate"):
            return await _evaluate(env, store)


async def _evaluate(env: HermesAgentBaseEnv, store: RunStore) -> int:
    items = list(await env.evaluation_items())
    if not items:
        raise ConfigError(f"{env.name} has no evaluation items: write `evaluation_items`, or raise env.eval_items")

    async def works() -> AsyncIterator[Work]:
        for index, item in enumerate(items):
            yield Work(index, env.item_id(item), item)

    async def run(work: Work) -> GroupResult:
        return await env.rollouts.run_group(work.item, work.index, env.config.eval_samples, env.config.eval_temperature)

    return await _run(env, works(), len(items), run, store)


async def _run(env: HermesAgentBaseEnv, works: AsyncIterator[Work], total: int, run: Any, store: RunStore) -> int:
    stop = Stop()
    with stop.on_signals(), progress_for() as progress:
        tally = await run_all(works, total, run, store, progress, stop, env.config.groups_at_once)
        summary = finish(env, store, tally)
    print_summary(summary)
    if stop.draining.is_set():
        log.warning("stopped after %d of %d groups; the same command goes on from there", tally.done, tally.total)
    elif summary.overall.losses.rollouts == summary.overall.rollouts > 0:
        raise RunFailed(_all_lost(list(store.records())))
    elif tally.dropped:
        log.warning("%d groups lost rollouts; the same command tries them again", tally.dropped)
    return 0 if tally.done == tally.total else 1


def _all_lost(records: Sequence[RolloutRecord]) -> str:
    """Why nothing was scored, by what ended most of the rollouts."""
    (outcome, error), count = Counter(
        (record.outcome, record.error or "no reason given") for record in records
    ).most_common(1)[0]
    return f"all {len(records)} rollouts were lost to infrastructure, {count} of them so: {outcome}: {error}"


def finish(env: HermesAgentBaseEnv, store: RunStore, tally: Tally) -> Summary:
    """Export, sum up, and say where everything is."""
    examples = export_sft(store.records(), store.directory / "sft.jsonl", env.config.rewards.solved_at)
    summary = summarize(store.records())
    write_whole(store.directory / "summary.json", summary.to_json())
    log.info("%s; %d SFT examples; %s", tally.line(), examples, store.rollouts_path)
    return summary


def _directory(env: HermesAgentBaseEnv, suffix: str) -> Path:
    return env.config.run_dir or Path("runs") / f"{env.name}{suffix}"


def _store(env: HermesAgentBaseEnv, verb: str, directory: Path, fresh: bool) -> RunStore:
    """The run's folder. It is opened before slots and model: one that cannot be used must not cost their start."""
    return RunStore(directory, {"verb": verb, **_identity(env)}, resume=not fresh)


def _identity(env: HermesAgentBaseEnv) -> dict[str, Any]:
    """What makes two starts the same run: the settings, but not how fast or how far to go."""
    settings = {key: value for key, value in masked(env.config).items() if key not in IGNORED_ON_RESUME}
    servers: Sequence[Any] = env.server_configs
    return {"environment": env.name, "env": settings, "openai": [masked(server) for server in servers]}
