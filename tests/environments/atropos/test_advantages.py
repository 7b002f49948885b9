"""Advantages: centred in the group, on the tokens of their turn, nothing where nothing is trained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.model.contract import Segment
from agent_loop.records.record import SampledCall
from environments.atropos.advantages import TurnRewardsInvalid, centered, check_turn_rewards, spread, turn_advantages

scores = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


@given(scores)
def test_advantages_of_a_group_sum_to_zero(values: list[float]) -> None:
    assert sum(centered(values, "mean")) == pytest.approx(0, abs=1e-6)
    assert sum(centered(values, "normalized")) == pytest.approx(0, abs=1e-6)


def test_normalized_divides_by_the_groups_deviation() -> None:
    assert centered([0.0, 1.0], "normalized") == [-1.0, 1.0]
    assert centered([0.0, 1.0], "mean") == [-0.5, 0.5]
    assert centered([3.0, 3.0], "normalized") == [0.0, 0.0]


def call(segment: int, ids: list[int]) -> SampledCall:
    return SampledCall(segment=segment, prompt_ids=[], sampled_ids=ids, logprobs=[], finish_reason="stop")


def test_without_turn_rewards_every_trained_token_gets_the_rollouts_advantage() -> None:
    segment = Segment([1, 2, 3], [-100, 2, 3], [1.0, -0.1, -0.1])
    assert spread(segment, 0, [], 0.5, []) == [0.0, 0.5, 0.5]


def test_turn_rewards_land_on_the_tokens_of_their_turn_across_segments() -> None:
    calls = [call(0, [2]), call(0, [4, 5]), call(1, [9])]
    first = Segment([1, 2, 3, 4, 5], [-100, 2, -100, 4, 5], [1.0, -0.1, 1.0, -0.1, -0.1])
    second = Segment([1, 2, 9], [-100, -100, 9], [1.0, 1.0, -0.1])
    assert spread(first, 0, calls, 1.0, [0.25, -0.25, 4.0]) == [0.0, 1.25, 0.0, 0.75, 0.75]
    assert spread(second, 1, calls, 1.0, [0.25, -0.25, 4.0]) == [0.0, 0.0, 5.0]


def test_a_segment_that_does_not_match_its_calls_is_an_error() -> None:
    with pytest.raises(TurnRewardsInvalid, match="trains 1 tokens but its calls sampled 2"):
        spread(Segment([1, 2], [-100, 2], [1.0, -0.1]), 0, [call(0, [2, 3])], 0.0, [1.0])


def test_turn_rewards_must_fit_the_turns() -> None:
    check_turn_rewards([0.0, 1.0], 2)
    with pytest.raises(TurnRewardsInvalid, match="1 turn rewards for 2"):
        check_turn_rewards([0.0], 2)
    with pytest.raises(TurnRewardsInvalid, match="finite"):
        check_turn_rewards([float("nan")], 1)


def test_turn_rewards_are_centred_over_all_turns_of_the_group() -> None:
    assert turn_advantages([[1.0], [0.0, 2.0]], "mean") == [[0.0], [-1.0, 1.0]]
    assert turn_advantages([[], []], "mean") == [[], []]


def test_a_deviation_that_is_only_rounding_is_none() -> None:
    assert centered([0.5, 0.5 + 1e-9], "normalized") == [0.0, 0.0]
    small, large = centered([0.0, 4e-6], "normalized")  # deviation 2e-6: small, and real
    assert (small, large) == (-1.0, 1.0)


def test_turns_are_centered_by_the_groups_baseline() -> None:
    assert turn_advantages([[0.0], [4.0]], "mean") == [[-2.0], [2.0]]
    assert turn_advantages([[0.0], [4.0]], "normalized") == [[-1.0], [1.0]]
    assert turn_advantages([[], []], "mean") == [[], []]
