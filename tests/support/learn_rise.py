"""How far the held-out success of a run of `learn` rose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def rise_in_standard_errors(entries: Sequence[dict[str, Any]], rollouts: int) -> float:
    """From the first evaluation to the last, each of at least so many rollouts; the error is that of the difference."""
    first, *_, last = (entry for entry in entries if entry["event"] == "evaluation")
    assert min(first["rollouts"], last["rollouts"]) >= rollouts
    error = math.hypot(first["standard_error"], last["standard_error"])
    assert last["parse_rate"] > 0.95
    return float((last["success"] - first["success"]) / error)
