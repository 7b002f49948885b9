"""Scored rollouts into groups of exactly the registered size, whatever number of segments each rollout has.

A rollout whose context was truncated has several segments. What happens to them is the `segments` policy:

- `all`: every segment is delivered with its rollout's advantage, written out per token. The last segments of a group's
  rollouts make the group itself; earlier ones wait until `group_size` of them are together and go as a group of their
  own (run-api strands groups of any other size). At the end of a run fewer than `group_size` may stay behind.
- `last`: only the last segment of each rollout is delivered.
- `forbid`: a group with such a rollout is rejected.

`Packer.tokens.fraction` is the share of the tokens sampled in accepted groups that was handed on for delivery.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agent_loop.model.contract import Message
from agent_loop.model.tokens.ledger import MASKED
from agent_loop.records.record import RolloutRecord
from environments.atropos.advantages import Baseline, centered, check_turn_rewards, spread, turn_advantages
from environments.atropos.groups import Group, GroupRejected, check_group

SegmentPolicy = Literal["all", "last", "forbid"]


@dataclass(frozen=True)
class ScoredRollout:
    """A trainable rollout with its score, and points per turn when the reward gives them."""

    record: RolloutRecord
    turn_rewards: tuple[float, ...] = ()


@dataclass(frozen=True)
class PackedRow:
    """One sequence on its way to a trainer."""

    tokens: list[int]
    masks: list[int]
    logprobs: list[float]
    score: float
    advantages: list[float] | None
    messages: list[Message]
    rollout_id: str
    segment: int
    weights_versions: list[str | None]
    """Which weights sampled each of its turns: what a trainer measures staleness by."""

    @property
    def trained(self) -> int:
        """Tokens that carry a gradient."""
        return len(self.masks) - self.masks.count(MASKED)


class PackedGroup(dict[str, Any]):
    """A group whose sequences were checked when it was packed. Make it a plain dict when you change it."""


@dataclass
class DeliveredTokens:
    """Sampled tokens of accepted groups, and how many of them were handed on for delivery."""

    sampled: int = 0
    delivered: int = 0

    def add(self, sampled: int, delivered: int) -> None:
        """Count those of another process."""
        self.sampled += sampled
        self.delivered += delivered

    def take(self) -> tuple[int, int]:
        """Both since the last call."""
        taken = self.sampled, self.delivered
        self.sampled = self.delivered = 0
        return taken

    @property
    def fraction(self) -> float:
        """1.0 when nothing was left out."""
        return self.delivered / self.sampled if self.sampled else 1.0


class Packer:
    """Makes groups; holds back the segments that do not fill one yet."""

    def __init__(self, group_size: int, segments: SegmentPolicy = "all", baseline: Baseline = "normalized") -> None:
        self.tokens = DeliveredTokens()
        self._group_size = group_size
        self._policy = segments
        self._baseline = baseline
        self._waiting: list[PackedRow] = []
        self._extra_groups = 0

    @property
    def waiting(self) -> int:
        """Segments held back until they fill a group."""
        return len(self._waiting)

    def pack(
        self,
        group_id: str,
        rollouts: Sequence[ScoredRollout],
        params: Mapping[str, Any],
        max_token_len: int = -1,
        scores_must_differ: bool = False,
    ) -> list[Group]:
        """The group, and any that its earlier segments complete; or GroupRejected, and then nothing of it is kept.

        All segments are checked here, before any of them can wait for a later group. Pure computation over every
        token: call it in a thread, one call at a time.
        """
        if len(rollouts) != self._group_size:
            raise GroupRejected("size", f"{len(rollouts)} rollouts in a group of {self._group_size}")
        rows = self._rows(rollouts)
        last = [row for row, end in rows if end]
        earlier = [row for row, end in rows if not end]
        self._check(last + earlier, max_token_len, scores_must_differ)
        self.tokens.sampled += sum(_sampled(rollout.record) for rollout in rollouts)
        groups = [self._group(group_id, last, params)]
        self._waiting += earlier
        while len(self._waiting) >= self._group_size:
            full, self._waiting = self._waiting[: self._group_size], self._waiting[self._group_size :]
            self._extra_groups += 1
            groups.append(self._group(f"{group_id}-segments{self._extra_groups}", full, params))
        return groups

    def _rows(self, rollouts: Sequence[ScoredRollout]) -> list[tuple[PackedRow, bool]]:
        """Every sequence to deliver, with whether it is its rollout's last."""
        several = any(len(rollout.record.segments) > 1 for rollout in rollouts)
        if several and self._policy == "forbid":
            raise GroupRejected("segments", "a rollout has several segments, and `segments: forbid` is set")
        explicit = any(rollout.turn_rewards for rollout in rollouts) or (several and self._policy == "all")
        advantages = self._advantages(rollouts) if explicit else [None] * len(rollouts)
        rows: list[tuple[PackedRow, bool]] = []
        for rollout, own in zip(rollouts, advantages, strict=True):
            if not rollout.record.segments:
                raise GroupRejected("untrained", f"rollout {rollout.record.rollout_id} has no tokens")
            final = len(rollout.record.segments) - 1
            for index in range(0 if self._policy == "all" else final, final + 1):
                rows.append((_row(rollout.record, index, own[index] if own else None), index == final))
        return rows

    def _advantages(self, rollouts: Sequence[ScoredRollout]) -> list[list[list[float]]]:
        """Per rollout, per segment, per token."""
        for rollout in rollouts:
            if rollout.turn_rewards:
                check_turn_rewards(rollout.turn_rewards, len(rollout.record.sampled_calls))
        outcomes = centered([_score(rollout.record) for rollout in rollouts], self._baseline)
        per_turn = turn_advantages([rollout.turn_rewards for rollout in rollouts], self._baseline)
        return [
            [
                spread(segment, index, rollout.record.sampled_calls, outcome, turns)
                for index, segment in enumerate(rollout.record.segments)
            ]
            for rollout, outcome, turns in zip(rollouts, outcomes, per_turn, strict=True)
        ]

    def _check(self, rows: list[PackedRow], max_token_len: int, scores_must_differ: bool) -> None:
        group = _as_group(rows, {})
        signal = group["advantages"] is not None and any(any(row) for row in group["advantages"])
        check_group(group, len(rows), max_token_len, scores_must_differ and not signal)

    def _group(self, group_id: str, rows: list[PackedRow], params: Mapping[str, Any]) -> Group:
        self.tokens.delivered += sum(row.trained for row in rows)
        ids = [row.rollout_id for row in rows]
        segments = [row.segment for row in rows]
        versions = [row.weights_versions for row in rows]
        named = {"group_id": group_id, "rollout_ids": ids, "segments": segments, "weights_versions": versions}
        return PackedGroup(_as_group(rows, {**params, **named}))


def _row(record: RolloutRecord, index: int, advantages: list[float] | None) -> PackedRow:
    segment = record.segments[index]
    messages = [message if "content" in message else {**message, "content": None} for message in record.messages]
    return PackedRow(
        segment.tokens,
        segment.masks,
        segment.logprobs,
        _score(record),
        advantages,
        messages,
        record.rollout_id,
        index,
        [call.weights_version for call in record.sampled_calls if call.segment == index],
    )


def _score(record: RolloutRecord) -> float:
    if record.score is None:
        raise GroupRejected("types", f"rollout {record.rollout_id} has no score")
    return record.score


def _sampled(record: RolloutRecord) -> int:
    return sum(len(segment.masks) - segment.masks.count(MASKED) for segment in record.segments)


def _as_group(rows: list[PackedRow], params: dict[str, Any]) -> Group:
    explicit = any(row.advantages is not None for row in rows)
    return {
        "tokens": [row.tokens for row in rows],
        "masks": [row.masks for row in rows],
        "inference_logprobs": [row.logprobs for row in rows],
        "scores": [row.score for row in rows],
        "advantages": [row.advantages for row in rows] if explicit else None,
        "messages": [row.messages for row in rows],
        "generation_params": params,
        # never None: atroposlib's own code reads it with .get
        "group_overrides": {},
    }
