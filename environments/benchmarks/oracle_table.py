"""What a benchmark gives to its own right answers and to nobody at all, as rows of a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from agent_loop.records.record import RolloutRecord

if TYPE_CHECKING:
    from rich.console import RenderableType

FULL = 1.0 - 1e-9
HEAD = (
    "| benchmark | items | oracle | no-op | seconds per item | fails the oracle | passes the no-op |",
    "|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class OracleRow:
    """One benchmark, played by its oracle and by a no-op."""

    name: str
    items: int
    oracle: float
    no_op: float
    seconds: float
    """Mean of the oracle's rollouts, on the machine that ran them."""
    failed: tuple[str, ...]
    """Items that their own right answer does not solve."""
    free: tuple[str, ...]
    """Items that are solved by doing nothing."""

    def markdown(self) -> str:
        """As a line of the table."""
        return f"| {' | '.join(self.cells())} |"

    def cells(self, most: int = 12) -> list[str]:
        """What the columns say; longer lists of items are counted."""
        return [
            self.name,
            str(self.items),
            f"{self.oracle:.4f}",
            f"{self.no_op:.4f}",
            f"{self.seconds:.2f}",
            _named(self.failed, most),
            _named(self.free, most),
        ]


def oracle_row(name: str, oracle: Iterable[RolloutRecord], no_op: Iterable[RolloutRecord]) -> OracleRow:
    """Of two evaluations over the same items; ValueError when they are not, or when rollouts were lost."""
    played, idle = _by_item(oracle), _by_item(no_op)
    if not played or played.keys() != idle.keys():
        raise ValueError(f"{name}: {len(played)} items of the oracle and {len(idle)} of the no-op are not the same")
    if lost := [item for item, record in (*played.items(), *idle.items()) if record.verifier_score is None]:
        raise ValueError(f"{name}: {len(lost)} rollouts have no score, such as that of {lost[0]}")
    scores = {item: float(record.verifier_score or 0.0) for item, record in played.items()}
    idle_scores = {item: float(record.verifier_score or 0.0) for item, record in idle.items()}
    return OracleRow(
        name,
        len(scores),
        math.fsum(scores.values()) / len(scores),
        math.fsum(idle_scores.values()) / len(scores),
        math.fsum(record.timing.get("total_s", 0.0) for record in played.values()) / len(scores),
        tuple(sorted((item for item, score in scores.items() if score < FULL), key=_by_number)),
        tuple(sorted((item for item, score in idle_scores.items() if score >= FULL), key=_by_number)),
    )


def table(rows: Sequence[OracleRow]) -> str:
    """All rows in Markdown."""
    return "\n".join([*HEAD, *(row.markdown() for row in rows)])


def on_terminal(rows: Sequence[OracleRow]) -> RenderableType:
    """All rows, as wide as the terminal is."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("benchmark", overflow="fold")
    for name in ("items", "oracle", "no-op", "s/item"):
        shown.add_column(name, justify="right", no_wrap=True)
    for name in ("fails the oracle", "passes the no-op"):
        shown.add_column(name, overflow="fold", ratio=1)
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row.cells()))
    return shown


def _by_item(records: Iterable[RolloutRecord]) -> dict[str, RolloutRecord]:
    """The last rollout of each item: an earlier one may have been lost and tried again."""
    return {record.item_id: record for record in records}


def _by_number(item: str) -> list[tuple[int, str]]:
    """task_9 before task_10: items end in any order, and the table is the same each time."""
    return [(int(part or 0), "") if place % 2 else (0, part) for place, part in enumerate(re.split(r"(\d+)", item))]


def _named(items: Sequence[str], most: int) -> str:
    if not items:
        return "none"
    return ", ".join(items) if len(items) <= most else f"{len(items)}: {', '.join(items[:most])}, ..."
