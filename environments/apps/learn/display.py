"""What `learn` prints while it runs: a live table on a terminal, plain lines in a pipe, JSON on request."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

import orjson
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from environments.runs.summary import sparkline

SPARK_WIDTH = 60
STEP_ROWS = (
    ("reward", "reward", None, None),
    ("training tasks solved", "success", 0.0, 1.0),
    ("answers that parse", "parse_rate", 0.0, 1.0),
    ("proven hacks", "hack_rate", 0.0, 1.0),
    ("logprob difference", "logprob_difference_mean", 0.0, None),
    ("staleness", "staleness_mean", 0.0, None),
    ("tokens/s", "tokens_per_s", 0.0, None),
)
"""Title, key, and bounds of the sparkline where they are fixed."""
SHARES = frozenset({"success", "parse_rate", "hack_rate"})
LINE_EVERY_S = 10.0


class Display(Protocol):
    """Is told what happens."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def say(self, text: str) -> None:
        """What is being done now."""

    def event(self, entry: dict[str, Any]) -> None:
        """A line of metrics.jsonl: a step or an evaluation."""

    def evaluating(self, done: int, total: int) -> None:
        """Tasks of the evaluation that are finished."""

    def end(self, lines: Sequence[str]) -> None:
        """The result, printed last."""


class LiveDisplay:
    """A table that is redrawn in place. Evaluations are also printed above it as lines, which stay."""

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
        self._status, self._evaluation = text, ""

    def event(self, entry: dict[str, Any]) -> None:
        if entry["event"] == "evaluation":
            self._evaluations.append(entry)
            self._console.print(Text(f"{clock(time.monotonic() - self._began)} {sentence(entry)}"))
        else:
            self._steps.append(entry)

    def evaluating(self, done: int, total: int) -> None:
        self._evaluation = f": {done} of {total} tasks"

    def end(self, lines: Sequence[str]) -> None:
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
            if all(value is None for value in values):
                continue
            shown = percent(values[-1]) if key in SHARES else number(values[-1])
            table.add_row(title, shown, Text(sparkline(values, low, high)))
        lines: list[RenderableType] = [table]
        if self._steps:
            last = self._steps[-1]
            lines.append(Text(f"step {last['step']}: {time_split(last)}", style="dim"))
        lines.append(Text(f"{clock(time.monotonic() - self._began)} {self._status}{self._evaluation}"))
        return Group(*lines)


class JsonDisplay:
    """One JSON object per line."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, text: str) -> None:
        self.event({"event": "status", "text": text})

    def event(self, entry: dict[str, Any]) -> None:
        self._out.write(orjson.dumps(entry).decode() + "\n")
        self._out.flush()

    def evaluating(self, done: int, total: int) -> None:
        self.event({"event": "evaluating", "done": done, "total": total})

    def end(self, lines: Sequence[str]) -> None:
        self.event({"event": "end", "lines": list(lines)})


class PlainDisplay:
    """A line per event, and one now and then while an evaluation runs."""

    def __init__(self, out: TextIO, every_s: float = LINE_EVERY_S) -> None:
        self._out, self._every_s = out, every_s
        self._began = self._last_s = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def say(self, text: str) -> None:
        self._last_s = time.monotonic()
        self._out.write(f"{clock(self._last_s - self._began)} {text}\n")
        self._out.flush()

    def event(self, entry: dict[str, Any]) -> None:
        self.say(sentence(entry))

    def evaluating(self, done: int, total: int) -> None:
        if time.monotonic() - self._last_s >= self._every_s:
            self.say(f"evaluating: {done} of {total} tasks")

    def end(self, lines: Sequence[str]) -> None:
        self._out.write("".join(f"{line}\n" for line in lines))
        self._out.flush()


def display_for(as_json: bool, out: TextIO | None = None) -> Display:
    stream = sys.stdout if out is None else out
    if as_json:
        return JsonDisplay(stream)
    if stream.isatty():
        return LiveDisplay(stream)
    return PlainDisplay(stream)


def sentence(entry: dict[str, Any]) -> str:
    if entry["event"] == "evaluation":
        kinds = ", ".join(f"{kind} {percent(part['success'])}" for kind, part in entry["by_kind"].items())
        return (
            f"evaluation after step {entry['step']}: held-out success {with_error(entry)} "
            f"({entry['rollouts']} rollouts of {entry['items']} tasks), parse rate {percent(entry['parse_rate'])}, "
            f"{entry['duration_s']:.0f} s [{kinds}]"
        )
    parts = [f"step {entry['step']}: reward {number(entry.get('reward'))}", f"success {percent(entry.get('success'))}"]
    parts += [f"parse rate {percent(entry.get('parse_rate'))}", f"loss {number(entry.get('loss'), 4)}"]
    if entry.get("hack_rate") is not None:
        parts += [f"proven hacks {percent(entry['hack_rate'])}"]
    if entry.get("kl") is not None:
        parts += [f"ratio {number(entry.get('ratio_mean'), 4)}", f"kl {entry['kl']:.1g}"]
    else:
        parts += [f"logprob difference {number(entry.get('logprob_difference_mean'), 4)}"]
    parts += [f"staleness {number(entry.get('staleness_mean'), 1)}"]
    parts += [f"{number(entry.get('tokens_per_s'), 0)} tokens/s", time_split(entry)]
    return ", ".join(parts)


def time_split(entry: dict[str, Any]) -> str:
    """How the seconds of a step were spent."""
    names = {"sampling_s": "sampling", "tools_s": "tools", "train_s": "training", "sync_s": "sync"}
    return " ".join(f"{name} {number(entry.get(key), 1)} s" for key, name in names.items())


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def with_error(entry: dict[str, Any]) -> str:
    error = entry.get("standard_error")
    return percent(entry.get("success")) + ("" if error is None else f" ± {100 * error:.1f}")


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:3d}:{rest:02d}"
