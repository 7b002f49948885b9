"""Figures of a step: means of what may be trained on, counts of everything."""

from __future__ import annotations

from environments.rollouts.rollouts import RolloutStats
from support.env_records import record


def test_lost_rollouts_are_counted_and_enter_no_mean() -> None:
    stats = RolloutStats()
    stats.add(
        record("g", 0, score=1.0, verifier_score=1.0, metrics={"turns": 2.0}, reward_components={"verifier": 1.0})
    )
    stats.add(
        record("g", 1, score=0.0, verifier_score=0.0, metrics={"turns": 4.0}, reward_components={"verifier": 0.0})
    )
    stats.add(record("g", 2, score=None, metrics={"turns": 99.0}))
    figures = stats.take()
    assert figures["rollouts/score"] == 0.5
    assert figures["rollouts/metrics/turns"] == 3.0
    assert figures["rollouts/reward/verifier"] == 0.5
    assert figures["outcomes/finished"] == 2.0
    assert figures["outcomes/lost_to_infrastructure"] == 1.0


def test_taking_the_figures_starts_again() -> None:
    stats = RolloutStats()
    stats.add(record("g", 0))
    stats.take()
    assert stats.take() == {"outcomes/lost_to_infrastructure": 0.0}
