"""Slots given back: however many at once, each has its time to die."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path

import pytest

from sandbox_pool.server.build.helper_build import get_helper
from sandbox_pool.server.isolation.cgroups import Cgroups
from sandbox_pool.server.isolation.levels import LEVELS, Place
from sandbox_pool.server.slots import slots
from sandbox_pool.server.slots.instance import Instance
from sandbox_pool.server.slots.zygote import Zygote

PLAIN = next(level for level in LEVELS if level.name == "plain")
LONG_ENOUGH = 100
"""Turns of the event loop, of which killing takes a handful."""


class DiesWhenTold(Zygote):
    """As a kernel with so much to take down that nobody's end is heard of for a while."""

    def __init__(self, scratch: str) -> None:
        super().__init__([str(get_helper(platform.machine()))], scratch, lambda: None)
        self.killed = 0
        self.told = asyncio.Event()

    def kill(self, pid: int) -> None:
        self.killed += 1
        super().kill(pid)

    async def wait_dead(self, pid: int) -> int:
        await self.told.wait()
        return await super().wait_dead(pid)


async def _nothing_runs(_: Instance) -> None:
    return None


async def test_few_of_many_that_are_given_back_die_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MOST_DYING", 3)
    monkeypatch.setattr(Instance, "kill_all", _nothing_runs)
    scratch = str(tmp_path)
    zygote = DiesWhenTold(scratch)
    try:
        builder = slots.Builder(zygote, PLAIN, Place(scratch, scratch, (), 0, 0, 0), Cgroups(scratch))
        built = [await builder.build(index, {}, ()) for index in range(12)]
        ends = asyncio.gather(*(builder.destroy(instance, index) for index, instance in enumerate(built)))
        for _ in range(LONG_ENOUGH):
            await asyncio.sleep(0)
        assert zygote.killed == 3
        zygote.told.set()
        assert await ends == [[]] * 12
        assert zygote.killed == 12
    finally:
        zygote.close()
