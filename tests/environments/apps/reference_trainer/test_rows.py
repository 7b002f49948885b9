"""From the wire to rows: what the packer of the environments sends is what the trainer reads."""

from __future__ import annotations

import json
import zlib
from itertools import zip_longest

import numpy as np
import pytest

from agent_loop.model.contract import Segment
from agent_loop.records.record import SampledCall
from environments.apps.reference_trainer.microbatches import microbatches, padded_length, shared_length
from environments.apps.reference_trainer.rows import BadBatch, group_advantages, oldest_version, read_batch
from environments.atropos.outbox import GZIP, encode_group
from environments.atropos.packing import Packer, ScoredRollout
from support.env_records import record


def segment(beginning, *stretches):
    """Alternately sampled and read stretches after a beginning that was read."""
    tokens, masks, logprobs = list(beginning), [-100] * len(beginning), [1.0] * len(beginning)
    for number, ids in enumerate(stretches):
        sampled = number % 2 == 0
        tokens += ids
        masks += ids if sampled else [-100] * len(ids)
        logprobs += [-0.25 * (i + 1) for i in range(len(ids))] if sampled else [1.0] * len(ids)
    return Segment(tokens, masks, logprobs)


def on_the_wire(groups):
    """As run-api hands them out."""
    return [json.loads(zlib.decompress(encode_group(group, 0), GZIP)) for group in groups]


def call(version):
    return SampledCall(0, [5], [8], [-0.25], "stop", weights_version=version)


def packed(segments_and_scores, versions=()):
    rollouts = [
        ScoredRollout(record("g", number, score, segments=segments, sampled_calls=list(map(call, own))))
        for number, ((segments, score), own) in enumerate(zip_longest(segments_and_scores, versions, fillvalue=()))
    ]
    return on_the_wire(Packer(len(rollouts)).pack("g", rollouts, {}))


def test_rows_of_a_packed_group_carry_ids_masks_logprobs_and_the_groups_advantage():
    first, second = segment([5, 6, 7], [8, 9], [10], [11]), segment([5, 6, 7], [12])
    one, other = read_batch(packed([([first], 1.0), ([second], 0.0)], [["m@4", "m@3"], ["m@4"]]), 0.05)
    assert one.tokens.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert one.trained.tolist() == [3, 4, 6]
    assert one.labels[one.trained].tolist() == [8, 9, 11]
    assert one.logprobs[one.trained].tolist() == [-0.25, -0.5, -0.25]
    assert one.advantages.tolist() == pytest.approx([0, 0, 0, 0.5 / 0.55, 0.5 / 0.55, 0, 0.5 / 0.55])
    assert other.advantages[other.trained].tolist() == pytest.approx([-0.5 / 0.55])
    assert (one.oldest_version, other.oldest_version) == (3, 4)


def test_several_segments_come_with_their_rollouts_own_advantage():
    cut = [segment([5, 6], [7, 8]), segment([5, 9], [10])]
    groups = packed([(cut, 1.0), (cut, 1.0), ([segment([5, 6], [11])], 0.0), ([segment([5, 6], [12])], 0.0)])
    rows = read_batch(groups, 0.05)
    assert groups[0]["advantages"] is not None
    assert [row.advantages[row.trained].tolist() for row in rows] == [[1.0], [1.0], [-1.0], [-1.0]]


def test_advantages_are_relative_to_rollouts_not_to_sequences():
    # One rollout in three segments, one in one: the mean of the rollouts is 0.5, that of the sequences 0.75.
    assert group_advantages([1.0, 1.0, 1.0, 0.0], ["a", "a", "a", "b"], 0.0) == [1.0, 1.0, 1.0, -1.0]
    assert group_advantages([0.3] * 3, ["a", "b", "c"], 0.0) == [0.0] * 3


def test_each_target_is_chosen_at_the_place_before_it_through_prefix_parent_and_own_segment():
    beginning = list(range(100, 140))
    groups = [
        packed(
            [
                ([segment([*beginning, task, 50], [1, 2, 3], [60, 61], [4])], 1.0),
                ([segment([*beginning, task, 50], [5])], 0.0),
            ]
        )[0]
        for task in (40, 41)
    ]
    rows = read_batch(groups, 0.05)
    assert shared_length(rows) == 40
    (batch,) = microbatches(rows, 36)
    flat = np.concatenate([batch.prefix, batch.segments.reshape(-1)])
    chosen = [(int(flat[place]), int(target)) for place, target in zip(batch.places, batch.targets, strict=True)]
    one_group = [(50, 1), (1, 2), (2, 3), (61, 4), (50, 5)]
    assert chosen[: int(batch.valid.sum())] == one_group * 2
    assert len(batch.prefix) == 32
    # 8 tokens of the beginning, the task and the 50 are the parent of both rows of a group.
    assert batch.parent_lengths[:6].tolist() == [0, 10, 10, 0, 10, 10]


def test_versions_are_numbers_behind_an_at_sign_or_unknown():
    assert oldest_version(["m@12", "7"]) == 7
    assert oldest_version([]) is None
    assert oldest_version(["m@3", None]) is None
    assert oldest_version(["abc"]) is None


def test_a_sequence_that_cannot_be_trained_is_named():
    group = packed([([segment([5], [8])], 1.0), ([segment([5], [12])], 0.0)])[0]
    group["masks"][1] = group["tokens"][1]
    with pytest.raises(BadBatch, match="sequence 1 of group g is sampled from nothing"):
        read_batch([group], 0.05)


def test_padded_lengths_are_few_and_close():
    lengths = [padded_length(n) for n in range(1, 513)]
    assert all(n <= padded <= max(8, 1.26 * n + 8) for n, padded in enumerate(lengths, 1))
    assert len(set(lengths)) < 24
