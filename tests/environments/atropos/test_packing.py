"""Groups from rollouts with any number of segments: exact sizes, each token once, advantages per rollout."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.model.contract import Segment
from agent_loop.records.record import RolloutRecord, SampledCall
from environments.atropos.advantages import TurnRewardsInvalid
from environments.atropos.groups import GroupRejected, check_group
from environments.atropos.packing import Packer, ScoredRollout


def rollout(name: str, score: float | None, segments: list[int], turn_rewards: tuple[float, ...] = ()) -> ScoredRollout:
    """One sampled call per segment; `segments` gives the number of tokens each samples."""
    parts, calls = [], []
    for index, sampled in enumerate(segments):
        ids = list(range(10, 10 + sampled))
        parts.append(Segment([1, 2, *ids], [-100, -100, *ids], [1.0, 1.0, *[-0.5] * sampled]))
        calls.append(SampledCall(index, [1, 2], ids, [-0.5] * sampled, "stop", weights_version=f"{name}@{index}"))
    record = RolloutRecord(
        rollout_id=name,
        group_id="g",
        environment="e",
        item_id="i",
        outcome="finished",
        trainable=True,
        messages=[{"role": "assistant"}],
        score=score,
        segments=parts,
        sampled_calls=calls,
    )
    return ScoredRollout(record, turn_rewards)


def test_single_segments_need_no_explicit_advantages() -> None:
    [group] = Packer(2).pack("g", [rollout("a", 0.0, [3]), rollout("b", 1.0, [3])], {"temperature": 1.0})
    assert group["advantages"] is None
    assert group["scores"] == [0.0, 1.0]
    assert group["generation_params"]["rollout_ids"] == ["a", "b"]
    assert group["messages"] == [[{"role": "assistant", "content": None}]] * 2
    check_group(group, 2)


def test_all_segments_carry_their_rollouts_advantage() -> None:
    packer = Packer(2, "all", "mean")
    groups = packer.pack("g", [rollout("a", 0.0, [1]), rollout("b", 1.0, [1, 1, 1])], {})
    assert [len(group["tokens"]) for group in groups] == [2, 2]
    main, extra = groups
    assert main["advantages"] == [[0.0, 0.0, -0.5], [0.0, 0.0, 0.5]]
    assert extra["generation_params"]["rollout_ids"] == ["b", "b"]
    assert extra["generation_params"]["segments"] == [0, 1]
    assert main["generation_params"]["weights_versions"] == [["a@0"], ["b@2"]]
    assert extra["generation_params"]["weights_versions"] == [["b@0"], ["b@1"]]
    assert extra["advantages"] == [[0.0, 0.0, 0.5]] * 2
    assert packer.tokens.fraction == 1.0


def test_segments_that_fill_no_group_wait_for_the_next() -> None:
    packer = Packer(2)
    assert len(packer.pack("g1", [rollout("a", 0.0, [1]), rollout("b", 1.0, [1, 1])], {})) == 1
    assert packer.waiting == 1
    assert packer.tokens.fraction == pytest.approx(2 / 3)
    groups = packer.pack("g2", [rollout("c", 0.0, [1]), rollout("d", 1.0, [1, 1])], {})
    assert [group["generation_params"]["rollout_ids"] for group in groups] == [["c", "d"], ["b", "d"]]
    assert (packer.waiting, packer.tokens.fraction) == (0, 1.0)


def test_last_delivers_only_last_segments_and_says_what_fraction_that_is() -> None:
    packer = Packer(2, "last")
    [group] = packer.pack("g", [rollout("a", 0.0, [2]), rollout("b", 1.0, [6, 2])], {})
    assert group["generation_params"]["segments"] == [0, 1]
    assert group["advantages"] is None
    assert packer.tokens.fraction == pytest.approx(0.4)


def test_forbid_rejects_the_group() -> None:
    with pytest.raises(GroupRejected, match="several segments"):
        Packer(2, "forbid").pack("g", [rollout("a", 0.0, [1]), rollout("b", 1.0, [1, 1])], {})


@pytest.mark.parametrize(
    ("rollouts", "reason"),
    [
        ([rollout("a", 0.0, [1])], "size"),
        ([rollout("a", 0.0, [1]), rollout("b", None, [1])], "types"),
        ([rollout("a", 0.0, [1]), rollout("b", float("nan"), [1])], "not_finite"),
        ([rollout("a", 0.0, [1]), rollout("b", 1.0, [])], "untrained"),
        ([rollout("a", 0.0, [1]), rollout("b", 1.0, [9, 1])], "too_long"),
        ([rollout("a", 1.0, [1]), rollout("b", 1.0, [1, 1])], "no_signal"),
    ],
)
def test_a_rejected_group_leaves_nothing_behind(rollouts: list[ScoredRollout], reason: str) -> None:
    packer = Packer(2)
    with pytest.raises(GroupRejected) as rejection:
        packer.pack("g", rollouts, {}, max_token_len=10, scores_must_differ=True)
    assert rejection.value.reason == reason
    assert (packer.waiting, packer.tokens.sampled) == (0, 0)


def test_turn_rewards_give_equal_scores_a_signal() -> None:
    pair = [rollout("a", 1.0, [1], (1.0,)), rollout("b", 1.0, [1], (0.0,))]
    [group] = Packer(2, baseline="mean").pack("g", pair, {}, scores_must_differ=True)
    assert group["advantages"] == [[0.0, 0.0, 0.5], [0.0, 0.0, -0.5]]


def test_turn_rewards_must_fit_the_turns() -> None:
    with pytest.raises(TurnRewardsInvalid, match="2 turn rewards for 1"):
        Packer(2).pack("g", [rollout("a", 1.0, [1], (1.0, 2.0)), rollout("b", 1.0, [1], (0.0,))], {})


@given(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=5), min_size=4, max_size=24))
def test_every_segment_is_delivered_exactly_once_in_groups_of_the_right_size(shapes: list[list[int]]) -> None:
    packer = Packer(4)
    shapes = shapes[: len(shapes) // 4 * 4]
    seen: Counter[tuple[str, int]] = Counter()
    for start in range(0, len(shapes), 4):
        members = [rollout(f"{start + n}", float(n), shape) for n, shape in enumerate(shapes[start : start + 4])]
        for group in packer.pack(f"g{start}", members, {}):
            check_group(group, 4)
            params = group["generation_params"]
            seen.update(zip(params["rollout_ids"], params["segments"], strict=True))
    assert set(seen.values()) <= {1}
    assert sum(seen.values()) + packer.waiting == sum(len(shape) for shape in shapes)
    assert packer.waiting < 4


def test_a_group_is_named_by_its_id_and_one_of_earlier_segments_by_its_number() -> None:
    packer = Packer(2, "all")
    names = []
    for number in range(3):
        pair = [rollout(f"a{number}", 0.0, [1, 2]), rollout(f"b{number}", 1.0, [1, 2])]
        names += [group["generation_params"]["group_id"] for group in packer.pack(f"g{number}", pair, {"t": 1})]
    assert names == ["g0", "g0-segments1", "g1", "g1-segments2", "g2", "g2-segments3"]


def test_equal_scores_are_no_signal_only_when_they_must_differ_and_no_advantage_says_more() -> None:
    same = [rollout("a", 1.0, [2]), rollout("b", 1.0, [2])]
    assert len(Packer(2).pack("g", same, {})) == 1
    with pytest.raises(GroupRejected, match=r"all 2 scores are 1\.0") as refused:
        Packer(2).pack("g", same, {}, scores_must_differ=True)
    assert refused.value.reason == "no_signal"
    by_turn = [rollout("a", 1.0, [2], (0.0,)), rollout("b", 1.0, [2], (1.0,))]
    [group] = Packer(2).pack("g", by_turn, {}, scores_must_differ=True)
    assert group["advantages"] == [[0.0, 0.0, -1.0, -1.0], [0.0, 0.0, 1.0, 1.0]]


def test_the_default_advantages_are_normalized_and_every_policy_is_the_one_that_was_chosen() -> None:
    pair = [rollout("a", 0.0, [1, 1]), rollout("b", 4.0, [1, 1])]
    assert Packer(2).pack("g", pair, {})[0]["advantages"] == [[0.0, 0.0, -1.0], [0.0, 0.0, 1.0]]
    assert Packer(2, "all", "mean").pack("g", pair, {})[0]["advantages"] == [[0.0, 0.0, -2.0], [0.0, 0.0, 2.0]]
    turns = [rollout("a", 0.0, [1], (0.0,)), rollout("b", 0.0, [1], (4.0,))]
    assert Packer(2, "all", "mean").pack("g", turns, {})[0]["advantages"] == [[0.0, 0.0, -2.0], [0.0, 0.0, 2.0]]
    last = Packer(2, "last")
    [group] = last.pack("g", pair, {})
    assert group["generation_params"]["segments"] == [1, 1]
    assert last.waiting == 0


@pytest.mark.parametrize(
    ("rollouts", "policy", "reason", "says"),
    [
        ([rollout("a", 1.0, [1])], "all", "size", "1 rollouts in a group of 2"),
        ([rollout("a", 1.0, [1, 1]), rollout("b", 1.0, [1])], "forbid", "segments", "a rollout has several segments"),
        ([rollout("a", 1.0, []), rollout("b", 1.0, [1])], "all", "untrained", "rollout a has no tokens"),
        ([rollout("a", None, [1]), rollout("b", 1.0, [1])], "all", "types", "rollout a has no score"),
    ],
)
def test_what_is_refused_is_refused_by_name(rollouts, policy, reason, says) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(GroupRejected) as refused:
        Packer(2, policy).pack("g", rollouts, {})
    assert refused.value.reason == reason
    assert str(refused.value).startswith(says)


def test_messages_are_handed_on_as_they_are_and_no_override_is_none() -> None:
    told = rollout("a", 0.0, [1])
    told.record.messages[:] = [{"role": "user", "content": "hi"}, {"role": "assistant"}]
    [group] = Packer(2).pack("g", [told, rollout("b", 1.0, [1])], {})
    assert group["messages"][0] == [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]
    assert group["group_overrides"] == {}
