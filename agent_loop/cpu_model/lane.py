"""One way through the front: training's, which is held and counted, or evaluation's, which is counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from agent_loop.cpu_model.gate import Gate
from agent_loop.cpu_model.merge import Merger


@dataclass
class LaneStats:
    """What one lane did."""

    requests: int = 0
    """As asked."""
    sent: int = 0
    """As sent to the server: merged ones count once."""
    sampled_tokens: int = 0
    read_tokens: int = 0
    busy_s: float = 0.0


@dataclass
class Lane:
    """Its gate, what it merges, and its figures."""

    gate: Gate
    merger: Merger
    stats: LaneStats = field(default_factory=LaneStats)
