"""Explicit per-token advantages: one number per rollout, or one per turn, spread over the tokens it belongs to.

Sent when rollouts have several segments (each segment then carries its rollout's advantage wherever it is delivered) or
when a reward gives points per turn. Otherwise trainers compute their own from the scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Literal

from agent_loop.model.contract import Segment
from agent_loop.model.tokens.ledger import MASKED
from agent_loop.records.record import SampledCall

Baseline = Literal["mean", "normalized"]
"""`mean`: value minus the group's mean (Dr. GRPO). `normalized`: that, divided by the group's deviation (GRPO)."""

SMALLEST_DEVIATION = 1e-6


class TurnRewardsInvalid(ValueError):
    """Per-turn rewards do not fit the turns of their rollout."""


def centered(values: Sequence[float], baseline: Baseline) -> list[float]:
    """Each value relative to all of them; zeros when they are all the same."""
    mean = fmean(values)
    scale = pstdev(values) if baseline == "normalized" else 1.0
    if scale < SMALLEST_DEVIATION:
        return [0.0] * len(values)
    return [(value - mean) / scale for value in values]


def check_turn_rewards(rewards: Sequence[float], turns: int) -> None:
    """One finite number for each sampled turn, or TurnRewardsInvalid."""
    if len(rewards) != turns:
        raise TurnRewardsInvalid(f"{len(rewards)} turn rewards for {turns} sampled turns")
    if not all(isinstance(r, (int, float)) and math.isfinite(r) for r in rewards):
        raise TurnRewardsInvalid(f"turn rewards {list(rewards)} are not all finite numbers")


def turn_advantages(rollouts: Sequence[Sequence[float]], baseline: Baseline) -> list[list[float]]:
    """Turn rewards of a whole group, each relative to every turn of every rollout of the group."""
    flat = centered([reward for rewards in rollouts for reward in rewards] or [0.0], baseline)
    values = iter(flat)
    return [[next(values) for _ in rewards] for rewards in rollouts]


def spread(
    segment: Segment, index: int, calls: Sequence[SampledCall], outcome: float, per_turn: Sequence[float]
) -> list[float]:
    """Advantage of every token of segment `index`: the rollout's own, plus its turn's; 0.0 where nothing is trained."""
    if not per_turn:
        return [0.0 if mask == MASKED else outcome for mask in segment.masks]
    lengths = [(turn, len(call.sampled_ids)) for turn, call in enumerate(calls) if call.segment == index]
    owning_turns = [turn for turn, length in lengths for _ in range(length)]
    trained = sum(mask != MASKED for mask in segment.masks)
    if len(owning_turns) != trained:
        raise TurnRewardsInvalid(f"segment {index} trains {trained} tokens but its calls sampled {len(owning_turns)}")
    owners = iter(owning_turns)
    return [0.0 if mask == MASKED else outcome + per_turn[next(owners)] for mask in segment.masks]
