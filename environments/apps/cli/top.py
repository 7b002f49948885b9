"""`hermes-rl top`: a run in the terminal while it goes on."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.errors import at_least

if TYPE_CHECKING:
    from rich.console import RenderableType

    from environments.runs.live import LiveRun

EXAMPLE = "hermes-rl top runs/terminal_tasks"
LAST = 8
CURVE_WIDTH = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="the folder of a run, or its rollouts.jsonl")
    parser.add_argument("--once", action="store_true", help="print it once and exit (always so in a pipe)")
    parser.add_argument(
        "--every", type=at_least(0.2, float), default=1.0, metavar="S", help="seconds between two looks (default 1)"
    )


def run(args: argparse.Namespace) -> int:
    """Show the run until it is interrupted."""
    from rich.console import Console
    from rich.live import Live

    from environments.runs.live import LiveRun, open_run

    followed = open_run(LiveRun(args.run))
    console = Console()
    if args.once or not console.is_terminal:
        console.print(render(followed))
        return 0
    with Live(render(followed), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(args.every)  # files cannot tell that they grew
            followed.look()
            live.update(render(followed), refresh=True)


def render(followed: LiveRun) -> RenderableType:
    """Facts, curves, outcomes and the newest rollouts; 80 columns are enough."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from environments.runs.summary import sparkline

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in followed.facts().items():
        facts.add_row(name, Text(value))
    parts: list[RenderableType] = [Text(str(followed.source), style="bold"), facts]
    for title, points in followed.curves().items():
        values = [value for _, value in points][-CURVE_WIDTH:]
        parts.append(Text(f"{title[:28]:<28}  {sparkline(values)} {values[-1]:.3f}"))
    if counts := followed.outcomes():
        parts.append(Text("outcomes: " + ", ".join(f"{name} {count}" for name, count in counts.most_common())))
    parts.append(_newest(followed.entries[-LAST:]))
    return Group(*parts)


def _newest(entries: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("newest rollouts", overflow="ellipsis", no_wrap=True, max_width=34)
    for name in ("outcome", "score", "turns", "time"):
        table.add_column(name, justify="left" if name == "outcome" else "right", no_wrap=True)
    for entry in reversed(entries):
        score = "-" if entry["verifier"] is None else f"{entry['verifier']:.3f}"
        table.add_row(entry["id"], entry["outcome"], score, str(entry["turns"]), f"{entry['time'][-1]:.1f} s")
    return table
