"""Progress of a run: a rich bar on a terminal, one plain line now and then in a pipe; the same facts in both."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self, TextIO

LINE_EVERY_S = 5.0


@dataclass
class Tally:
    """What a run has done so far."""

    total: int
    """Groups to do, finished ones of an earlier start included."""
    done: int = 0
    resumed: int = 0
    """Of those done, how many an earlier start had finished."""
    dropped: int = 0
    rollouts: int = 0
    lost: int = 0
    """Rollouts that infrastructure ended."""
    score_sum: float = 0.0
    started_at: float = field(default_factory=time.monotonic)

    @property
    def per_minute(self) -> float:
        """Groups per minute of this start."""
        elapsed = time.monotonic() - self.started_at
        return 60.0 * (self.done - self.resumed) / elapsed if elapsed > 0 else 0.0

    @property
    def eta_s(self) -> float | None:
        """Seconds to go at this rate."""
        return 60.0 * (self.total - self.done) / self.per_minute if self.per_minute > 0 else None

    @property
    def mean_score(self) -> float | None:
        """Mean verifier score of this start, as the table at the end has it: shaping does not enter."""
        return self.score_sum / self.rollouts if self.rollouts else None

    def line(self) -> str:
        mean = "-" if self.mean_score is None else f"{self.mean_score:.3f}"
        parts = [f"{self.done}/{self.total} groups", f"{self.per_minute:.1f}/min", f"eta {_clock(self.eta_s)}"]
        parts += [f"{self.rollouts} rollouts", f"mean score {mean}"]
        parts += [f"{count} {name}" for count, name in ((self.lost, "lost"), (self.dropped, "dropped")) if count]
        return ", ".join(parts)


class Progress(Protocol):
    """Shows a tally while a run goes on."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, tally: Tally) -> None: ...


class PlainProgress:
    """At most one line every few seconds, and one at the end."""

    def __init__(self, out: TextIO, every_s: float = LINE_EVERY_S) -> None:
        self._out = out
        self._every_s = every_s
        self._last_s = float("-inf")
        self._unsaid: Tally | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._unsaid is not None:
            self._say(self._unsaid)

    def show(self, tally: Tally) -> None:
        """Say it, unless something was said a moment ago."""
        self._unsaid = tally
        if time.monotonic() - self._last_s >= self._every_s:
            self._say(tally)

    def _say(self, tally: Tally) -> None:
        self._out.write(tally.line() + "\n")
        self._out.flush()
        self._last_s = time.monotonic()
        self._unsaid = None


class BarProgress:
    """A live bar with rate and time to go."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._bar = Progress(
            SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), console=Console(file=out), transient=False
        )
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._bar.stop()

    def show(self, tally: Tally) -> None:
        self._bar.update(self._task, total=tally.total, completed=tally.done, description=tally.line())


def progress_for(out: TextIO | None = None) -> Progress:
    """The kind that suits where the output goes; stderr by default, so that results can be piped."""
    stream = sys.stderr if out is None else out
    return BarProgress(stream) if stream.isatty() else PlainProgress(stream)


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
