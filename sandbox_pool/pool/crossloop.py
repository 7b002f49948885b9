"""Calls into the pool's own event loop from any other loop, without ever losing a result on the way.

`asyncio.run_coroutine_threadsafe` drops the result of a call that finished at the moment its caller was cancelled;
for a lease that would be a leak. Here exactly one side ends up with the result: the caller, or `reclaim`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from sandbox_pool.errors import PoolClosed

T = TypeVar("T")


class _Handover:
    """Who has the result: a lock decides the race between delivery and cancellation."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._delivered = False
        self._abandoned = False

    def deliver(self) -> bool:
        """True when the caller is still there to take the result."""
        with self._lock:
            self._delivered = not self._abandoned
            return self._delivered

    def abandon(self) -> bool:
        """True when the result had not been delivered yet; then it never will be."""
        with self._lock:
            self._abandoned = not self._delivered
            return self._abandoned


async def call_in_loop(
    home: asyncio.AbstractEventLoop,
    call: Callable[[], Coroutine[Any, Any, T]],
    reclaim: Callable[[T], None],
) -> T:
    """Await `call()` in the loop `home`. Cancelling this cancels the call; a result nobody took is reclaimed."""
    here = asyncio.get_running_loop()
    if here is home:
        return await call()
    handover = _Handover()
    answer: asyncio.Future[T] = here.create_future()
    running: list[asyncio.Task[None]] = []
    results: list[T] = []

    def settle(error: BaseException | None) -> None:
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(results[0])

    async def run() -> None:
        error: BaseException | None = None
        try:
            results.append(await call())
        except asyncio.CancelledError:
            # The caller was not cancelled itself, or it would not be there to be told.
            error = PoolClosed("the pool was closed while it was being asked")
        except Exception as failure:  # noqa: BLE001 - delivered to the caller below
            error = failure
        try:
            if handover.deliver():
                here.call_soon_threadsafe(settle, error)
                return
        except RuntimeError:
            pass  # the caller's loop is closed: nobody will take the result
        if results:
            reclaim(results[0])

    home.call_soon_threadsafe(lambda: running.append(home.create_task(run())))
    try:
        return await answer
    except asyncio.CancelledError:
        if handover.abandon():
            home.call_soon_threadsafe(lambda: running[0].cancel())
        elif results:
            home.call_soon_threadsafe(reclaim, results[0])
        raise
