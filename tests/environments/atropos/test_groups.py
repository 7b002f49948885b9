"""A group that could harm a trainer is refused, with a reason; one that could not is passed."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.atropos.groups import GroupRejected, check_group
from support.atropos_envs import numbered_group


def reason(group: dict[str, Any], **limits: Any) -> str | None:
    try:
        check_group(group, limits.pop("group_size", 4), **limits)
    except GroupRejected as rejection:
        return rejection.reason
    return None


def test_a_good_group_passes() -> None:
    assert reason(numbered_group(1)) is None


def test_optional_lists_may_be_missing_or_none() -> None:
    assert reason(numbered_group(1, advantages=None, messages=None, ref_logprobs=None, group_overrides=None)) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda g: g["tokens"].pop(), "size"),
        (lambda g: g["scores"].append(1.0), "size"),
        (lambda g: g.pop("inference_logprobs"), "shape"),
        (lambda g: g.update(advantages=[[0.0]] * 3), "size"),
        (lambda g: g["masks"][2].pop(), "shape"),
        (lambda g: g["inference_logprobs"][0].append(-0.1), "shape"),
        (lambda g: g.update(advantages=[[0.0]] * 4), "shape"),
        (lambda g: g["tokens"].__setitem__(1, tuple(g["tokens"][1])), "shape"),
        (lambda g: g["scores"].__setitem__(0, np.float32(1)), "types"),
        (lambda g: g["scores"].__setitem__(0, None), "types"),
        (lambda g: g["scores"].__setitem__(0, True), "types"),
        (lambda g: g["tokens"][0].__setitem__(0, np.int64(3)), "types"),
        (lambda g: g["tokens"][0].__setitem__(0, -3), "types"),
        (lambda g: g["inference_logprobs"][0].__setitem__(3, None), "types"),
        (lambda g: g["scores"].__setitem__(0, float("nan")), "not_finite"),
        (lambda g: g["inference_logprobs"][1].__setitem__(4, float("-inf")), "not_finite"),
        (lambda g: g["masks"][0].__setitem__(3, 77), "masks"),
        (lambda g: g["masks"][0].__setitem__(3, -100), "logprobs"),
        (lambda g: g["inference_logprobs"][0].__setitem__(3, 0.2), "logprobs"),
        (lambda g: g["inference_logprobs"][0].__setitem__(0, 0.0), "logprobs"),
        (lambda g: g.update(messages=[[{"role": "user"}]] * 4), "messages"),
        (lambda g: g.update(messages=[[]] * 3), "size"),
    ],
)
def test_what_would_break_a_trainer_is_refused(change: Any, expected: str) -> None:
    group = numbered_group(1)
    change(group)
    assert reason(group) == expected


def test_a_sequence_without_a_trained_token_is_refused() -> None:
    group = numbered_group(1)
    group["masks"][3] = [-100] * 6
    group["inference_logprobs"][3] = [1.0] * 6
    assert reason(group) == "untrained"


def test_an_empty_sequence_is_refused() -> None:
    group = numbered_group(1)
    for key in ("tokens", "masks", "inference_logprobs"):
        group[key][2] = []
    assert reason(group) == "untrained"


def test_the_trainers_length_limit_is_exclusive_and_ignored_when_unset() -> None:
    group = numbered_group(1, length=6)
    assert reason(group, max_token_len=6) == "too_long"
    assert reason(group, max_token_len=7) is None
    assert reason(group, max_token_len=-1) is None


def test_equal_scores_are_no_signal_only_when_they_must_differ() -> None:
    group = numbered_group(1, scores=[0.5] * 4)
    assert reason(group, scores_must_differ=True) == "no_signal"
    assert reason(group) is None


@given(st.data())
def test_no_single_corruption_of_a_number_passes(data: st.DataObject) -> None:
    """Whatever one number of a list becomes (shorter, NaN, None, text, a flipped mask), the group is refused."""
    group = copy.deepcopy(numbered_group(1))
    key = data.draw(st.sampled_from(["tokens", "masks", "inference_logprobs"]))
    row = data.draw(st.integers(0, 3))
    position = data.draw(st.integers(0, 5))
    bad = data.draw(st.sampled_from([float("nan"), float("inf"), None, "7", 10**6 + 0.5, [1], True]))
    group[key][row][position] = bad
    assert reason(group) is not None
