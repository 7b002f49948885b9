"""The live board of `learn` on a terminal: curves as sparklines, the last figures beside them, what goes on now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from environments.learn.show import clock, number, percent, sentence, sparkline, time_split, with_error

SPARK_WIDTH = 60
STEP_ROWS = (
    ("reward", "reward", None, None),
    ("training tasks solved", "success", 0.0, 1.0),
    ("answers that parse", "parse_rate", 0.0, 1.0),
    ("logprob difference", "logprob_difference_mean", 0.0, None),
    ("staleness", "staleness_mean", 0.0, None),
    ("tokens/s", "tokens_per_s", 0.0, None),
)
"""Title, key, and bounds of the sparkline where they are fixed."""
SHARES = frozenset({"success", "parse_rate"})


class BoardShow:
    """Redraws itself; what must stay readable afterwards (evaluations) is printed above it as lines."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out)
        self._began = time.monotonic()
        self._status = ""
        self._evaluation = ""
        self._steps: list[dict[str, Any]] = []
        self._evaluations: list[dict[str, Any]] = []
        self._live = Live(console=self._console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """The line below the table."""
        self._status, self._evaluation = text, ""

    def event(self, entry: dict[str, Any]) -> None:
        """New figures."""
        if entry["event"] == "evaluation":
            self._evaluations.append(entry)
            self._console.print(Text(f"{clock(time.monotonic() - self._began)} {sentence(entry)}"))
        else:
            self._steps.append(entry)

    def evaluating(self, done: int, total: int) -> None:
        """How far the evaluation is."""
        self._evaluation = f": {done} of {total} tasks"

    def end(self, lines: Sequence[str]) -> None:
        """Below the board, which stays as it was."""
        self._status, self._evaluation = "", ""
        self._live.stop()
        for line in lines:
            self._console.print(Text(line))

    def _render(self) -> RenderableType:
        table = Table(box=None, pad_edge=False, header_style="bold")
        table.add_column("")
        table.add_column("now", justify="right")
        table.add_column("so far")
        if self._evaluations:
            curve = sparkline([entry["success"] for entry in self._evaluations], 0.0, 1.0)
            table.add_row("held-out success", with_error(self._evaluations[-1]), Text(curve, style="bold green"))
        for title, key, low, high in STEP_ROWS if self._steps else ():
            values = [step.get(key) for step in self._steps][-SPARK_WIDTH:]
            shown = percent(values[-1]) if key in SHARES else number(values[-1])
            table.add_row(title, shown, Text(sparkline(values, low, high)))
        lines: list[RenderableType] = [table]
        if self._steps:
            last = self._steps[-1]
            lines.append(Text(f"step {last['step']}: {time_split(last)}", style="dim"))
        lines.append(Text(f"{clock(time.monotonic() - self._began)} {self._status}{self._evaluation}"))
        return Group(*lines)
