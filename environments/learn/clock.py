"""How long steps and evaluations take, and whether another step still fits into the time given."""

from __future__ import annotations

import statistics
import time

RECENT = 5


class Clock:
    """Time of a run; that of earlier starts counts as passed for the curves, but not against the limit."""

    def __init__(self, minutes: float | None, earlier_s: float = 0.0) -> None:
        self._began = time.monotonic()
        self._limit_s = None if minutes is None else 60.0 * minutes
        self._earlier_s = earlier_s
        self._steps_s: list[float] = []
        self._evaluation_s = 0.0

    @property
    def elapsed_s(self) -> float:
        """Since the first start of the run."""
        return self._earlier_s + time.monotonic() - self._began

    def step_took(self, seconds: float) -> None:
        """One more step."""
        self._steps_s.append(seconds)

    def evaluation_took(self, seconds: float) -> None:
        """The last evaluation."""
        self._evaluation_s = seconds

    def another_step_fits(self) -> bool:
        """Whether one more step and the last evaluation would end in time."""
        if self._limit_s is None or not self._steps_s:
            return True
        step_s = statistics.median(self._steps_s[-RECENT:])
        return time.monotonic() - self._began + step_s + self._evaluation_s <= self._limit_s
