"""Background tasks of one owner. The event loop keeps only weak references, so somebody must hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class TaskSet:
    """Holds tasks until they are done."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run this in the background, in the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """Cancel all of them; `finish` waits for their end."""
        for task in list(self._running):
            task.cancel()

    async def finish(self) -> None:
        """Return when all of them are done, those that they started included. Their errors are not raised here."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)
