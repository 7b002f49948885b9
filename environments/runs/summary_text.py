"""A summary for people: rich tables for the terminal."""

from __future__ import annotations

import sys

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from environments.runs.summary import Slice, Summary

PIPE_WIDTH = 160
"""Columns where there is no terminal: no line of a table is broken."""


def render(summary: Summary) -> RenderableType:
    """Policies, categories and losses as tables."""
    parts: list[RenderableType] = [_scores("policy", summary.policies, summary.overall)]
    if len(summary.categories) > 1:
        parts.append(_scores("category", summary.categories, None))
    parts += [_causes(summary.overall), Text(_losses(summary.overall))]
    return Group(*parts)


def print_summary(summary: Summary, console: Console | None = None) -> None:
    """Write the tables to a console, stdout by default."""
    console = console or Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
    console.print(render(summary))


def _scores(title: str, slices: tuple[Slice, ...], total: Slice | None) -> Table:
    rows = [*slices, *([total] if total is not None and len(slices) > 1 else [])]
    ks = sorted({k for row in rows for k in row.pass_at if k > 1})[-2:]
    table = Table(title=None, box=None, header_style="bold", pad_edge=False)
    table.add_column(title)
    for name in (
        "score",
        *(f"pass@{k}" for k in ks),
        "reward",
        "rollouts",
        "lost",
        "valid calls",
        "turns",
        "tokens",
        "time",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        calls = row.calls.get("valid_rate")
        table.add_row(
            row.name,
            _with_error(row.mean_score, row.standard_error),
            *(_percent(row.pass_at.get(k)) for k in ks),
            _number(row.mean_reward),
            str(row.rollouts),
            str(row.losses.rollouts),
            _percent(calls),
            _number(row.turns_mean, 1),
            f"{row.sampled_tokens:,.0f}",
            f"{sum(row.time_s.values()):,.0f} s",
        )
    return table


def _causes(row: Slice) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("why no full score")
    table.add_column("rollouts", justify="right")
    for cause, count in row.zeros.items():
        table.add_row(cause, str(count))
    return table


def _losses(row: Slice) -> str:
    losses = row.losses
    if not losses.rollouts:
        return "Nothing was lost to infrastructure."
    causes = ", ".join(f"{count} {name}" for name, count in losses.by_cause.items())
    return (
        f"Lost to infrastructure: {losses.rollouts} of {row.rollouts} rollouts ({causes}), "
        f"worth {losses.points:.1f} points; counted as zeros they would "
        f"lower the mean from {_number(row.mean_score)} to {_number(losses.mean_if_zero)}."
    )


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _with_error(value: float | None, error: float | None) -> str:
    return _number(value) if error is None else f"{_number(value)} ± {error:.3f}"
