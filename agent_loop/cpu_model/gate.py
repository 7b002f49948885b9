"""A gate before the model: work passes while it is open; closing waits for what is inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """`async with gate.passing(turn)`: only while the gate is open, and only in turn."""

    def __init__(self, is_open: bool) -> None:
        self._open = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0
        if is_open:
            self._open.set()

    @property
    def is_open(self) -> bool:
        """Whether work passes."""
        return self._open.is_set()

    def open(self) -> None:
        """Let work pass."""
        self._open.set()

    async def close(self) -> None:
        """Let nothing more in; returns when nothing is inside."""
        self._open.clear()
        await self._empty.wait()

    async def opened(self) -> None:
        """Wait until it is open."""
        while not self._open.is_set():
            await self._open.wait()

    @asynccontextmanager
    async def passing(self, turn: asyncio.Semaphore) -> AsyncIterator[None]:
        """Inside the gate. Who waits for its turn is outside still, so that closing does not wait for a whole queue."""
        while True:
            await self.opened()
            async with turn:
                if not self.is_open:
                    continue
                self._inside += 1
                self._empty.clear()
                try:
                    yield
                finally:
                    self._inside -= 1
                    if not self._inside:
                        self._empty.set()
                return
