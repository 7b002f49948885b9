"""Whether anything is going on in a sandbox: its idle timeout counts from the last moment there was."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator


class Activity:
    """Busy while a command runs, input is taken or a connection through a tunnel is open."""

    def __init__(self) -> None:
        self._busy = 0
        self._since = time.monotonic()
        self.changed = asyncio.Event()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """For as long as this lasts."""
        self._busy += 1
        self.changed.set()
        try:
            yield
        finally:
            self._busy -= 1
            self._since = time.monotonic()
            self.changed.set()

    def idle_s(self) -> float:
        """Seconds since it was busy; 0 when it is."""
        return 0.0 if self._busy else time.monotonic() - self._since
