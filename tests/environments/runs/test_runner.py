"""Groups side by side, each stored once, resumed where a start left off."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent_loop.records.record import RolloutRecord
from environments.atropos.stops import Stop
from environments.runs.batch import Work, run_all
from environments.runs.progress import PlainProgress, Tally
from environments.runs.store import RunDiffers, RunStore
from support.atropos_envs import until
from support.env_records import record


@dataclass
class Outcome:
    rollouts: list[RolloutRecord]
    complete: bool = True

    def records(self) -> list[RolloutRecord]:
        return self.rollouts


async def items(count: int, prefix: str = "item") -> AsyncIterator[Work]:
    for index in range(count):
        yield Work(index, f"{prefix}-{index}", index)


class Groups:
    """Runs groups, and remembers which and how many at a time."""

    def __init__(self, seconds: float = 0.0, fail: int | None = None, gate: asyncio.Event | None = None) -> None:
        self.seconds, self.fail, self.gate = seconds, fail, gate
        self.ran: list[int] = []
        self.now = self.most = 0

    async def __call__(self, work: Work) -> Outcome:
        self.ran.append(work.index)
        self.now += 1
        self.most = max(self.most, self.now)
        await (self.gate.wait() if self.gate else asyncio.sleep(self.seconds))
        self.now -= 1
        if work.index == self.fail:
            raise RuntimeError("boom")
        return Outcome([record(f"g{work.index}", n, score=n) for n in range(2)])


async def run(directory: Path, groups: Groups, count: int = 6, at_once: int = 3, stop: Stop | None = None) -> Tally:
    with RunStore(directory, {}) as store, PlainProgress(io.StringIO()) as progress:
        return await run_all(items(count), count, groups, store, progress, stop or Stop(), at_once)


async def test_groups_run_side_by_side_up_to_the_limit(tmp_path: Path) -> None:
    groups = Groups(0.02)
    tally = await run(tmp_path, groups)
    assert (groups.most, tally.done, tally.rollouts, tally.mean_score) == (3, 6, 12, 0.5)


async def test_a_second_start_repeats_nothing(tmp_path: Path) -> None:
    await run(tmp_path, Groups(), count=4)
    again = Groups()
    tally = await run(tmp_path, again, count=6)
    assert again.ran == [4, 5]
    assert (tally.done, tally.resumed) == (6, 4)


async def test_a_crash_keeps_what_was_finished(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        await run(tmp_path, Groups(fail=3), at_once=1)
    again = Groups()
    await run(tmp_path, again)
    assert again.ran == [3, 4, 5]


async def test_a_stop_finishes_what_runs_and_starts_nothing(tmp_path: Path) -> None:
    gate = asyncio.Event()
    stop, groups = Stop(), Groups(gate=gate)
    running = asyncio.create_task(run(tmp_path, groups, stop=stop))
    await until(lambda: groups.now == 3)
    stop.ask("test")
    gate.set()
    tally = await running
    assert groups.ran == [0, 1, 2]
    assert tally.done == 3


async def test_a_second_stop_cancels(tmp_path: Path) -> None:
    stop, groups = Stop(), Groups(60)
    running = asyncio.create_task(run(tmp_path, groups, stop=stop))
    await until(lambda: groups.now == 3)
    stop.ask("first")
    stop.ask("second")
    assert (await asyncio.wait_for(running, 5)).done == 0


async def test_items_that_changed_are_refused(tmp_path: Path) -> None:
    await run(tmp_path, Groups(), count=1)
    progress = PlainProgress(io.StringIO())
    with RunStore(tmp_path, {}) as store, pytest.raises(RunDiffers, match="was item item-0, now it is other-0"):
        await run_all(items(1, "other"), 1, Groups(), store, progress, Stop(), 1)


async def test_lost_rollouts_and_dropped_groups_are_counted_apart(tmp_path: Path) -> None:
    async def lossy(work: Work) -> Outcome:
        return Outcome([record(f"g{work.index}", 0), record(f"g{work.index}", 1, score=None)], complete=work.index > 0)

    with RunStore(tmp_path, {}) as store, PlainProgress(io.StringIO()) as progress:
        tally = await run_all(items(2), 2, lossy, store, progress, Stop(), 2)
    assert (tally.done, tally.dropped, tally.lost, tally.rollouts) == (1, 1, 2, 2)
