"""The machine a sandbox runs on, as its clients reach it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

from grpclib import Status

from .faults import error

Reach = Literal["well", "hangs", "refuses"]
T = TypeVar("T")


async def first_of(*events: asyncio.Event, timeout_s: float | None = None) -> None:
    """Return when one of the events is set, or when the time is over."""
    tasks = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


class Worker:
    """Reached well, or not: then calls and tunnels hang until it is again, or are refused and cut."""

    def __init__(self) -> None:
        self.reach: Reach = "well"
        self._moves = asyncio.Event()
        self._moves.set()
        self._refuses = asyncio.Event()

    def set_reach(self, reach: Reach) -> None:
        """From now on, for what is under way as well."""
        self.reach = reach
        for event, is_set in ((self._moves, reach != "hangs"), (self._refuses, reach == "refuses")):
            event.set() if is_set else event.clear()

    async def gate(self) -> None:
        """Pass when bytes go through."""
        await self._moves.wait()
        if self.reach == "refuses":
            raise error(Status.UNAVAILABLE, "worker is unreachable")

    async def reached(self, work: Callable[[], Awaitable[T]]) -> T:
        """Do it, as a client on the other side of the network sees it."""
        await self.gate()
        task = asyncio.ensure_future(work())
        done = asyncio.Event()
        task.add_done_callback(lambda _: done.set())
        try:
            await first_of(done, self._refuses)
            await self.gate()
            return await task
        finally:
            task.cancel()
