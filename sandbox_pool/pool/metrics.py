"""Counters and latencies of a pool: bounded memory however long it runs."""

from __future__ import annotations

import math
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

KEPT = 4096
"""Samples kept per latency: enough for a p99, small enough to keep for ever."""


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile (0..1) of sorted values, by nearest rank."""
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


class Reservoir:
    """An even sample of all values seen (Vitter's algorithm R), with the exact count and maximum."""

    def __init__(self, kept: int = KEPT, seed: int = 0) -> None:
        self.count = 0
        self.maximum = 0.0
        self._kept = kept
        self._random = random.Random(seed)
        self._values: list[float] = []

    def add(self, value: float) -> None:
        """Take one value into account."""
        self.count += 1
        self.maximum = max(self.maximum, value)
        if len(self._values) < self._kept:
            self._values.append(value)
        elif (at := self._random.randrange(self.count)) < self._kept:
            self._values[at] = value

    def summary(self, scale: float = 1.0) -> dict[str, float]:
        """count, p50, p95, p99 and max; values multiplied by `scale`."""
        ordered = sorted(self._values)
        shown = {f"p{q}": round(percentile(ordered, q / 100) * scale, 3) for q in (50, 95, 99)}
        return {"count": self.count, **shown, "max": round(self.maximum * scale, 3)}


@dataclass
class PoolMetrics:
    """What a pool did so far. Safe to use from any thread."""

    acquire_s: Reservoir = field(default_factory=Reservoir)
    """From the call of `lease` to the usable sandbox, waiting included."""
    exec_s: Reservoir = field(default_factory=Reservoir)
    reset_s: Reservoir = field(default_factory=Reservoir)
    start_s: Reservoir = field(default_factory=Reservoir)
    counts: Counter[str] = field(default_factory=Counter)
    """leases, reuses (leases of a slot that served before), quarantines, lost_hosts, lost_leases, expired_leases,
    start_failures, acquire_timeouts, hosts_started, hosts_stopped"""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def observe(self, what: str, seconds: float) -> None:
        """Record one latency: acquire, exec, reset or start."""
        reservoir: Reservoir = getattr(self, f"{what}_s")
        with self._lock:
            reservoir.add(seconds)

    def bump(self, name: str, by: int = 1) -> None:
        """Count something."""
        with self._lock:
            self.counts[name] += by

    def summary(self) -> dict[str, Any]:
        """Everything as plain data, latencies in milliseconds."""
        with self._lock:
            latencies = {
                f"{name}_ms": getattr(self, f"{name}_s").summary(1000.0)
                for name in ("acquire", "exec", "reset", "start")
            }
            return {**latencies, **dict(sorted(self.counts.items()))}
