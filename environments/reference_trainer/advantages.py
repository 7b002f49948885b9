"""Advantages from scores, as GRPO does it: how much better than the rest of its group a rollout did.

Only used where the environment sent no `advantages` of its own. The mean is over rollouts, not over sequences: a
rollout that was cut into three segments must not count three times.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from statistics import fmean, pstdev


def group_advantages(scores: Sequence[float], rollouts: Sequence[Hashable], std_floor: float) -> list[float]:
    """One number per sequence; zeros when all rollouts of the group did equally well."""
    by_rollout = dict(zip(rollouts, scores, strict=True))
    mean, deviation = fmean(by_rollout.values()), pstdev(by_rollout.values())
    if len(set(by_rollout.values())) == 1:
        return [0.0] * len(scores)
    return [(score - mean) / (deviation + std_floor) for score in scores]
