"""SIGTERM and SIGINT as two events: the first asks to finish what runs, the second to stop at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

log = logging.getLogger(__name__)
Result = TypeVar("Result")
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Asked to drain, then asked to stop now. Without signals it is driven by `ask`."""

    def __init__(self) -> None:
        self.draining = asyncio.Event()
        self.now = asyncio.Event()

    def ask(self, why: str) -> None:
        """First call: finish what runs. Second call: stop at once."""
        if self.draining.is_set():
            log.warning("%s again: stopping at once", why)
            self.now.set()
        else:
            log.warning("%s: starting nothing new, finishing what runs", why)
            self.draining.set()

    async def unless_draining(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """The result of some work; None when a stop is asked for first, and then the work is cancelled."""
        working = asyncio.create_task(work)
        stopping = asyncio.create_task(self.draining.wait())
        try:
            await asyncio.wait({working, stopping}, return_when="FIRST_COMPLETED")
            return None if stopping.done() else working.result()
        finally:
            stopping.cancel()
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[Stop]:
        """Handle SIGTERM and SIGINT by `ask` inside the block (main thread's loop only; elsewhere a no-op)."""
        loop = asyncio.get_running_loop()
        installed = []
        for number in SIGNALS:
            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                loop.add_signal_handler(number, self.ask, signal.Signals(number).name)
                installed.append(number)
        try:
            yield self
        finally:
            for number in installed:
                loop.remove_signal_handler(number)
