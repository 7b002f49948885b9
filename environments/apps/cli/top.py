"""`hermes-rl top`: a run in the terminal while it goes on."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.consoles import new_console
from environments.errors import at_least
from environments.printable import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from environments.runs.live import LiveRun

EXAMPLE = "hermes-rl top runs/terminal_tasks"
LAST = 8
"""Rollouts shown where there is no screen to fill."""
WIDE = 120
"""Columns from which on curves stand beside the facts."""
VALUE, PAIR = 22, 34
"""Columns of a value, and of a whole fact, that may share its line with another on a narrow screen."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run, or its rollouts.jsonl")
    parser.add_argument("--once", action="store_true", help="print it once and exit (always so in a pipe)")
    parser.add_argument(
        "--every", type=at_least(0.2, float), default=1.0, metavar="S", help="seconds between two looks (default 1)"
    )


def run(args: argparse.Namespace) -> int:
    """Show the run until it is interrupted."""
    from rich.live import Live

    from environments.runs.live import WATCHING_SHARE, LiveRun, open_run

    followed = open_run(LiveRun(args.run))
    console = new_console()
    if args.once or not console.is_terminal:
        console.print(render(followed, console.width))
        return 0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            began = time.thread_time()
            followed.look()
            live.update(render(followed, *console.size), refresh=True)
            spent = time.thread_time() - began
            time.sleep(max(args.every, spent / WATCHING_SHARE))  # files cannot tell that they grew


def render(followed: LiveRun, width: int, height: int | None = None) -> RenderableType:
    """Facts, curves, outcomes, and as many of the newest rollouts as the screen has room for."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    wide = width >= WIDE
    facts = _facts(followed.facts(), paired=not wide)
    curves = _curves(followed, (width // 2 if wide else width) - 42)
    parts: list[RenderableType] = [Text(str(followed.source), style="bold", no_wrap=True, overflow="ellipsis")]
    if wide:
        both = Table.grid(padding=(0, 4), expand=True)
        both.add_column(ratio=1)
        both.add_column(ratio=1)
        both.add_row(facts, Group(*curves))
        parts.append(both)
        used = max(facts.row_count, len(curves))
    else:
        parts += [facts, *curves]
        used = facts.row_count + len(curves)
    room = LAST if height is None else max(0, height - used - 2)  # the source, and the header of what follows
    if room:
        parts.append(_newest(followed.entries[-room:], width))
    return Group(*parts)


def _facts(facts: dict[str, str], *, paired: bool) -> Table:
    """One on each line; on a narrow screen short ones share it."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True, min_width=max(map(len, facts)))
    table.add_column(no_wrap=True, overflow="ellipsis")
    line: tuple[str, Text] | None = None
    """A short fact that may share its line."""
    for name, value in facts.items():
        text = Text(printable(value), style=_style(name, value))
        short = paired and len(value) <= VALUE and len(name) + len(value) + 2 <= PAIR
        if line is not None and short:
            shared = line[1]
            shared.pad_right(VALUE + 2 - len(shared))
            table.add_row(line[0], shared.append(f"{name}  ", style="bold").append_text(text))
            line = None
            continue
        if line is not None:
            table.add_row(*line)
        line = (name, text) if short else None
        if not short:
            table.add_row(name, text)
    if line is not None:
        table.add_row(*line)
    return table


def _style(name: str, value: str) -> str:
    """Colours of the sixteen that every terminal has: readable on light and on dark ones."""
    if name == "run":
        return "green" if value.endswith(": running") else "red" if "no word" in value else ""
    return "red" if name == "lost" and value != "none" else ""


def _curves(followed: LiveRun, width: int) -> list[RenderableType]:
    from rich.text import Text

    from environments.runs.summary import sparkline

    lines: list[RenderableType] = []
    for title, points in followed.curves().items():
        values = [value for _, value in points][-max(8, width) :]
        line = Text(f"{title[:28]:<28}  ", no_wrap=True, overflow="ellipsis")
        lines.append(line.append(sparkline(values), style="green").append(f" {values[-1]:.3f}"))
    if counts := followed.outcomes():
        text = "outcomes: " + ", ".join(f"{name} {count}" for name, count in counts.most_common())
        lines.append(Text(printable(text), no_wrap=True, overflow="ellipsis"))
    return lines


def _newest(entries: list[dict[str, Any]], width: int) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    wide = width >= WIDE
    table = Table(box=None, header_style="bold", pad_edge=False, expand=wide)
    table.add_column("newest rollouts", overflow="ellipsis", no_wrap=True, max_width=34)
    for name in ("outcome", "score", "turns", "time"):
        table.add_column(name, justify="left" if name == "outcome" else "right", no_wrap=True)
    if wide:  # as much of it as the others leave
        table.add_column("asked", overflow="ellipsis", no_wrap=True, ratio=1)
    for entry in reversed(entries):
        score = "-" if entry["verifier"] is None else f"{entry['verifier']:.3f}"
        cells = [entry["outcome"], score, str(entry["turns"]), f"{entry['time'][-1]:.1f} s"]
        asked = [Text(printable(" ".join(entry["asked"].split())))] if wide else []
        table.add_row(Text(printable(entry["id"])), *(Text(printable(cell)) for cell in cells), *asked)
    return table
