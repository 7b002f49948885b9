"""Runs groups of a fixed list of items at the same time, stores each when it is whole, and can be asked to stop.

The order of items is fixed by the environment's seed, so group k is the same task in every start of a run: finished
groups are skipped by their number, and an item that no longer matches the stored one is an error instead of a mix of
two runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_loop.records import RolloutRecord
from environments.atropos.stops import Stop
from environments.runs.progress import Progress, Tally
from environments.runs.store import RunDiffers, RunStore

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
