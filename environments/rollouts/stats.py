"""Figures of many rollouts for one log line: means by name, counts by outcome."""

from __future__ import annotations

from collections import Counter, defaultdict

from agent_loop.records.record import RolloutRecord


class RolloutStats:
    """Collects rollouts between two log lines."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._lost = 0

    def add(self, record: RolloutRecord) -> None:
        """Count one rollout; only trainable ones enter the means."""
        self._outcomes[record.outcome] += 1
        if not record.trainable:
            self._lost += 1
            return
        values = {f"metrics/{name}": value for name, value in record.metrics.items()}
        values |= {f"reward/{name}": value for name, value in record.reward_components.items()}
        values |= {f"timing/{name}": value for name, value in record.timing.items()}
        if record.score is not None:
            values["score"] = record.score
        if record.verifier_score is not None:
            values["verifier_score"] = record.verifier_score
        values["segments"] = float(len(record.segments))
        for name, value in values.items():
            self._sums[name] += value
            self._counts[name] += 1

    def take(self) -> dict[str, float]:
        """The figures so far, and start again."""
        figures = {f"rollouts/{name}": total / self._counts[name] for name, total in sorted(self._sums.items())}
        figures |= {f"outcomes/{name}": float(count) for name, count in sorted(self._outcomes.items())}
        figures["outcomes/lost_to_infrastructure"] = float(self._lost)
        self.__init__()  # type: ignore[misc]
        return figures
