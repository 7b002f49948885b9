"""What the demo shows: live bars (plain lines in a pipe), the final table, and what was proven."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from agent_loop.records.against import Confirmation
from agent_loop.records.record import RolloutRecord
from agent_loop.records.verify import Report
from environments.apps.demo.players import Player

COLUMNS = ("policy", "n", "solved", "reward", "valid", "repaired", "malformed", "turns", "tokens", "outcomes")


class Board:
    """Progress of every policy."""

    def __init__(self, console: Console, players: Sequence[Player], groups: int, group_size: int) -> None:
        self._console = console
        self._live = console.is_terminal
        self._scores: defaultdict[str, list[float]] = defaultdict(list)
        self._bars = Progress(
            TextColumn("{task.fields[policy]:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[score]}"),
            TimeElapsedColumn(),
            console=console,
        )
        self._tasks: dict[str, TaskID] = {}
        self._left = {player.name: groups for player in players}
        for player in players:
            total = groups * group_size
            self._tasks[player.name] = self._bars.add_task("", total=total, policy=player.env.policy_name, score="")

    def __enter__(self) -> Self:
        if self._live:
            self._bars.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live:
            self._bars.stop()

    def group_done(self, player: Player, records: Sequence[RolloutRecord]) -> None:
        """One more group of this policy has ended."""
        scores = self._scores[player.name]
        scores += [record.verifier_score for record in records if record.verifier_score is not None]
        solved = f"solved {fmean(scores):.0%}" if scores else ""
        self._bars.update(self._tasks[player.name], advance=len(records), score=solved)
        self._left[player.name] -= 1
        if not self._live and self._left[player.name] == 0:
            self._console.print(f"{player.env.policy_name}: {len(scores)} rollouts, {solved}", markup=False)


def final_table(records: Sequence[RolloutRecord]) -> Table:
    """One row per policy."""
    table = Table(box=SIMPLE_HEAD, header_style="bold", pad_edge=False)
    for name in COLUMNS:
        left = name in ("policy", "outcomes")
        table.add_column(name, justify="left" if left else "right", no_wrap=name == "policy")
    by_policy: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        by_policy[record.policy].append(record)
    for policy, own in by_policy.items():
        table.add_row(policy, *_row(own))
    return table


def _row(records: Sequence[RolloutRecord]) -> list[str]:
    trained = [record for record in records if record.trainable]
    attempted = _total(trained, "tool_calls_attempted")
    outcomes = Counter(record.outcome for record in records)
    return [
        str(len(records)),
        _mean([record.verifier_score for record in trained], ".0%"),
        _mean([record.score for record in trained], "+.2f"),
        f"{_total(trained, 'tool_calls_schema_valid') / attempted:.0%}" if attempted else "-",
        f"{_total(trained, 'tool_calls_repaired'):.0f}",
        f"{_total(trained, 'tool_calls_malformed'):.0f}",
        _mean([record.metrics.get("turns") for record in trained], ".1f"),
        f"{_total(trained, 'sampled_tokens'):,.0f}",
        ", ".join(f"{name} {count}" for name, count in outcomes.most_common()),
    ]


def _total(records: Sequence[RolloutRecord], metric: str) -> float:
    return sum(record.metrics.get(metric, 0.0) for record in records)


def _mean(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    return format(fmean(known), form) if known else "-"


def pool_line(metrics: Mapping[str, Any], records: Sequence[RolloutRecord]) -> str:
    """Latencies of the slots and how isolated they were."""
    levels = Counter(record.isolation for record in records if record.isolation)
    times = ((name, metrics[f"{name}_ms"]) for name in ("acquire", "exec", "reset"))
    parts = [f"{name} p50 {time['p50']:.1f} / p95 {time['p95']:.1f} ms" for name, time in times]
    return f"slots: {', '.join(parts)}; isolation: {', '.join(levels) or 'none'}"


def verdict_lines(report: Report, confirmation: Confirmation | None, rollouts: Path, page: Path) -> list[str]:
    """What was stored and what was proven about it."""
    checks = len(report.checked)
    exact = "exact" if report.ok else f"NOT EXACT: {report.violations[0]}"
    lines = [f"verify: {report.rollouts} rollouts, {checks} checks each: {exact}"]
    if confirmation is not None:
        said = confirmation.violation or f"confirmed (mean difference {confirmation.mean:.3f})"
        lines.append(f"verify --against the model itself, {len(confirmation.differences)} positions: {said}")
    return [*lines, f"rollouts: {rollouts}", f"page:     {page}"]
