"""SIGTERM and SIGINT: a step that was begun is finished and saved; waiting for others ends at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stopped(Exception):
    """A stop was asked for while waiting."""


class Stop:
    """Whether to stop; `waiting` marks the places where that may happen at once."""

    def __init__(self) -> None:
        self.asked = False
        self._waiting = False

    def on_signals(self) -> None:
        """Listen. Only the main thread may."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def ask(self) -> None:
        """Stop at the next place where nothing is lost by it."""
        self.asked = True
        if self._waiting:
            self._waiting = False
            raise Stopped

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, a stop raises Stopped."""
        self._waiting = True
        try:
            if self.asked:
                raise Stopped
            yield
        finally:
            self._waiting = False

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.ask()
