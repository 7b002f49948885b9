"""Estimators over scores that come in clusters: several rollouts of one task are not independent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return math.fsum(values) / len(values) if values else None


def clustered_standard_error(clusters: Mapping[str, Sequence[float]]) -> float | None:
    """Standard error of the mean over all values, robust to any correlation within a cluster; None below two clusters.

    sqrt(G / (G - 1)) * sqrt(sum over clusters of (sum of deviations)^2) / N. With one value per cluster this is the
    usual standard error of the mean.
    """
    full = [list(values) for values in clusters.values() if values]
    count = sum(map(len, full))
    if len(full) < 2:
        return None
    centre = math.fsum(value for values in full for value in values) / count
    squares = math.fsum(math.fsum(value - centre for value in values) ** 2 for values in full)
    return math.sqrt(squares * len(full) / (len(full) - 1)) / count


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement from these, is correct (Chen et al., 2021)."""
    if not 0 <= correct <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {correct} correct in {samples} samples is not defined")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod((samples - correct - i) / (samples - i) for i in range(k))


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float | None:
    """Mean of pass@k over tasks given as (samples, correct); tasks with fewer than k samples are left out."""
    return mean([pass_at_k(samples, correct, k) for samples, correct in counts if samples >= k])
