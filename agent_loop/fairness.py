"""Keeps a crowd of rollouts from holding the event loop: work that is ready at once is spread over its iterations.

An event loop runs everything that is ready before it looks at anything else. When hundreds of answers arrive together,
their rollouts' milliseconds add up to one long stall for sockets, timers and deadlines. `wait_in_line` lets a few
rollouts work in each iteration; the others wait, first come, first served.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque

AT_ONCE = 2
"""Rollouts that work in one iteration; each takes about a millisecond."""


class _Line:
    """The rollouts that wait for an iteration of one event loop."""

    def __init__(self) -> None:
        self._room = AT_ONCE
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._room == AT_ONCE:
            loop.call_soon(self._next_iteration, loop)
        if self._room > 0:
            self._room -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_iteration(self, loop: asyncio.AbstractEventLoop) -> None:
        self._room = AT_ONCE
        while self._waiting and self._room > 0:
            turn = self._waiting.popleft()
            if not turn.done():  # a cancelled one gives its place to the next
                turn.set_result(None)
                self._room -= 1
        if self._room < AT_ONCE:
            loop.call_soon(self._next_iteration, loop)


_lines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Line] = weakref.WeakKeyDictionary()


async def wait_in_line() -> None:
    """Wait for an iteration of the event loop that has room; returns at once when this one has."""
    loop = asyncio.get_running_loop()
    await _lines.setdefault(loop, _Line()).wait(loop)
