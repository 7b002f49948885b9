"""Two runs over the same items: the paired difference with its interval, wins, losses and flips.

An item counts where both runs scored it. Its difference is the mean verifier score of B less that of A, and each item
weighs the same. The interval is Student's t over clusters of items, so any number of rollouts, seeds or related items
within a cluster leaves it honest. What infrastructure ended is in no mean: it is listed, and the difference is also
given as it would be if every lost rollout counted 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent_loop.records.record import RolloutRecord
from environments.errors import UsageError
from environments.runs.intervals import sign_test, t_quantile
from environments.runs.report.html_page import UnreadableRun, read_rollouts
from environments.runs.summary import FULL_SCORE, clustered_standard_error, mean

ROUNDING = 1e-12
"""A smaller standard error is none: all clusters have the same difference, and nothing tells how far off it is."""


@dataclass(frozen=True)
class ItemPair:
    """One item in both runs."""

    item_id: str
    category: str
    scores_a: tuple[float, ...]
    """Verifier scores of the rollouts that were scored."""
    scores_b: tuple[float, ...]
    lost_a: int
    """Rollouts that ended without a score."""
    lost_b: int

    @property
    def difference(self) -> float | None:
        """Mean of B less mean of A; None when a side has no score."""
        before, after = mean(self.scores_a), mean(self.scores_b)
        return None if before is None or after is None else after - before

    @property
    def flip(self) -> str:
        """`fixed`: never solved in A, always in B. `broken`: the other way round. Otherwise empty."""
        if self.difference is None:
            return ""
        solved_a, solved_b = ([score >= FULL_SCORE for score in scores] for scores in (self.scores_a, self.scores_b))
        if not any(solved_a) and all(solved_b):
            return "fixed"
        return "broken" if all(solved_a) and not any(solved_b) else ""


@dataclass(frozen=True)
class Comparison:
    """B against A."""

    name_a: str
    name_b: str
    pairs: tuple[ItemPair, ...]
    """Items that both runs have, scored or not, by id."""
    only_a: tuple[str, ...]
    """Items of A that B does not have."""
    only_b: tuple[str, ...]
    mean_a: float | None
    """Over the matched items, each with the same weight."""
    mean_b: float | None
    difference: float | None
    standard_error: float | None
    """None where it cannot be told: fewer than two clusters, or no difference between any two of them."""
    interval: tuple[float, float] | None
    """95 %, clustered."""
    clusters: int
    wins: int
    """Items with a higher mean in B."""
    losses: int
    ties: int
    p_value: float
    """Exact sign test over wins and losses."""
    difference_if_zero: float | None
    """The difference if lost rollouts counted 0, over all items that both runs have."""

    @property
    def matched(self) -> tuple[ItemPair, ...]:
        """Items that both runs scored: those that the difference is about."""
        return tuple(pair for pair in self.pairs if pair.difference is not None)

    @property
    def unscored(self) -> tuple[ItemPair, ...]:
        """Items that a run lost entirely."""
        return tuple(pair for pair in self.pairs if pair.difference is None)

    @property
    def fixed(self) -> tuple[str, ...]:
        return tuple(pair.item_id for pair in self.pairs if pair.flip == "fixed")

    @property
    def broken(self) -> tuple[str, ...]:
        return tuple(pair.item_id for pair in self.pairs if pair.flip == "broken")

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self) | {"fixed": self.fixed, "broken": self.broken, "matched": len(self.matched)}


ClusterKey = Callable[[ItemPair], str]


def by_item(pair: ItemPair) -> str:
    return pair.item_id


def by_category(pair: ItemPair) -> str:
    return pair.category


def compare(
    records_a: Iterable[RolloutRecord],
    records_b: Iterable[RolloutRecord],
    name_a: str = "A",
    name_b: str = "B",
    cluster: ClusterKey = by_item,
) -> Comparison:
    """Match the items of two runs and sum up. `cluster` names what belongs together beyond one item."""
    items_a, items_b = _by_item(records_a), _by_item(records_b)
    pairs = tuple(_pair(name, items_a[name], items_b[name]) for name in sorted(items_a.keys() & items_b.keys()))
    matched = [(pair, found) for pair in pairs if (found := pair.difference) is not None]
    clusters: defaultdict[str, list[float]] = defaultdict(list)
    for pair, found in matched:
        clusters[cluster(pair)].append(found)
    difference = mean([found for _, found in matched])
    error = clustered_standard_error(clusters)
    if error is not None and error < ROUNDING:
        error = None
    wins, losses = (sum(sign * found > 0 for _, found in matched) for sign in (1, -1))
    return Comparison(
        name_a=name_a,
        name_b=name_b,
        pairs=pairs,
        only_a=tuple(sorted(items_a.keys() - items_b.keys())),
        only_b=tuple(sorted(items_b.keys() - items_a.keys())),
        mean_a=mean([math.fsum(pair.scores_a) / len(pair.scores_a) for pair, _ in matched]),
        mean_b=mean([math.fsum(pair.scores_b) / len(pair.scores_b) for pair, _ in matched]),
        difference=difference,
        standard_error=error,
        interval=_interval(difference, error, len(clusters)),
        clusters=len(clusters),
        wins=wins,
        losses=losses,
        ties=len(matched) - wins - losses,
        p_value=sign_test(wins, losses),
        difference_if_zero=mean([_with_zeros(pair) for pair in pairs]),
    )


def _by_item(records: Iterable[RolloutRecord]) -> dict[str, list[RolloutRecord]]:
    items: dict[str, list[RolloutRecord]] = {}
    for record in records:
        items.setdefault(record.item_id, []).append(record)
    return items


def _scores(records: Sequence[RolloutRecord]) -> tuple[float, ...]:
    return tuple(r.verifier_score for r in records if r.trainable and r.verifier_score is not None)


def _pair(item_id: str, records_a: Sequence[RolloutRecord], records_b: Sequence[RolloutRecord]) -> ItemPair:
    scores_a, scores_b = _scores(records_a), _scores(records_b)
    return ItemPair(
        item_id=item_id,
        category=records_a[0].category,
        scores_a=scores_a,
        scores_b=scores_b,
        lost_a=len(records_a) - len(scores_a),
        lost_b=len(records_b) - len(scores_b),
    )


def _with_zeros(pair: ItemPair) -> float:
    after = math.fsum(pair.scores_b) / (len(pair.scores_b) + pair.lost_b)
    return after - math.fsum(pair.scores_a) / (len(pair.scores_a) + pair.lost_a)


def _interval(difference: float | None, error: float | None, clusters: int) -> tuple[float, float] | None:
    if difference is None or error is None:
        return None
    half = t_quantile(clusters - 1) * error
    return difference - half, difference + half


def read_run(path: Path) -> list[RolloutRecord]:
    """The rollouts of a run: its file, its folder, or a folder of runs (`evaluate --models`). UsageError otherwise."""
    files = [path]
    if path.is_dir():
        files = (
            [path / "rollouts.jsonl"] if (path / "rollouts.jsonl").exists() else sorted(path.rglob("rollouts.jsonl"))
        )
    if not files or not files[0].exists():
        raise UsageError(f"there is no rollouts.jsonl at {path}")
    try:
        records = [record for file in files for record in read_rollouts(file)]
    except UnreadableRun as error:
        raise UsageError(str(error)) from error
    if not records:
        raise UsageError(f"{path} holds no rollouts")
    return records


def render(found: Comparison, most_items: int = 20) -> RenderableType:
    """The comparison as text: the difference, what it rests on, flips, and what infrastructure took."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("", "mean score", "items", "rollouts", "lost"):
        table.add_column(name, justify="right" if name else "left")
    for name, value, side in ((found.name_a, found.mean_a, "a"), (found.name_b, found.mean_b, "b")):
        scored = sum(len(getattr(pair, f"scores_{side}")) for pair in found.matched)
        lost = sum(getattr(pair, f"lost_{side}") for pair in found.pairs)
        table.add_row(
            name, f"{value:.3f}" if value is not None else "-", str(len(found.matched)), str(scored), str(lost)
        )
    lines = [_difference_line(found), f"Wins {found.wins}, losses {found.losses}, ties {found.ties}."]
    lines += _listed("Fixed (never solved before, always now)", found.fixed, most_items)
    lines += _listed("Broken (always solved before, never now)", found.broken, most_items)
    if any(pair.lost_a or pair.lost_b for pair in found.pairs):
        lines.append(f"If lost rollouts counted 0, the difference would be {found.difference_if_zero or 0.0:+.3f}.")
    lines += _listed("Lost entirely on a side, so not compared", [pair.item_id for pair in found.unscored], most_items)
    lines += _listed(f"Only in {found.name_a}", found.only_a, most_items)
    lines += _listed(f"Only in {found.name_b}", found.only_b, most_items)
    return Group(table, Text("\n".join(lines)))


def _difference_line(found: Comparison) -> str:
    if found.difference is None:
        return "No item was scored in both runs."
    line = f"Difference {found.difference:+.3f}"
    if found.interval is None:
        why = "fewer than two clusters" if found.clusters < 2 else "the items do not differ among each other"
        return f"{line}, without an interval: {why}."
    low, high = found.interval
    rests_on = f"{found.clusters} clusters; sign test p = {found.p_value:.3g}"
    return f"{line}, 95 % interval {low:+.3f} to {high:+.3f} ({rests_on})."


def _listed(title: str, names: Sequence[str], most: int) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return [f"{title}: {len(names)}: {', '.join(names[:most])}{more}"]


CLUSTERS: Mapping[str, ClusterKey] = {"item": by_item, "category": by_category}
