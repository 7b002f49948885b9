"""Intervals for means and shares, without a library: Student's t for means, Wilson's for shares."""

from __future__ import annotations

import math
from statistics import NormalDist

LEVEL = 0.95


def t_quantile(freedom: int, level: float = LEVEL) -> float:
    """The value that |t| stays below with this probability; by bisection of the exact distribution."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < level:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, freedom) < level else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """P(|T| < t) for whole degrees of freedom: the finite sums 26.7.3 and 26.7.4 of Abramowitz and Stegun."""
    theta = math.atan2(t, math.sqrt(freedom))
    squared, odd = math.cos(theta) ** 2, freedom % 2
    term, total = 1.0, 0.0
    for number in range((freedom - odd) // 2):
        total += term
        term *= squared * (2 * number + 1 + odd) / (2 * number + 2 + odd)
    if not odd:
        return math.sin(theta) * total
    return 2 / math.pi * (theta + math.sin(theta) * math.cos(theta) * total)


def wilson(hits: int, trials: int, level: float = LEVEL) -> tuple[float, float]:
    """Interval of a share. It has width at 0 and at 1 too, where the usual one has none; all of it without trials."""
    if not trials:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, spread = hits / trials, z * z / trials
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / trials + spread / (4 * trials))
    return (0.0 if hits == 0 else centre - half), (1.0 if hits == trials else centre + half)


def sign_test(wins: int, losses: int) -> float:
    """Chance of a split at least this uneven when both sides are equally likely to win: two-sided, exact."""
    count, fewer = wins + losses, min(wins, losses)
    tail = sum(math.comb(count, k) for k in range(fewer + 1))
    return min(1.0, 2.0 * (tail / (1 << count)))
