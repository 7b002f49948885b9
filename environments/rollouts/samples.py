"""`Sample`: one training sequence in no trainer's dialect, and how scored rollouts become samples.

Atropos' own (-100 for what is not trained, 1.0 for its logprob) is made in environments/atropos.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agent_loop.model.tokens.ledger import MASKED
from agent_loop.records.record import RolloutRecord
from environments.atropos.advantages import Baseline, centered, check_turn_rewards, spread, turn_advantages
from environments.atropos.packing import ScoredRollout, SegmentPolicy
from environments.errors import ConfigError


@dataclass(frozen=True)
class Sample:
    """One prefix-stable sequence of a rollout. Most rollouts have one; each truncation of the context begins another.

    `tokens`, `mask` and `logprobs` have the same length.
    """

    tokens: list[int]
    """What the model was given and what it sampled, exactly."""
    mask: list[int]
    """1 where the model sampled the token and it is to be trained, 0 elsewhere: prompt, tool results, glue."""
    logprobs: list[float]
    """Of the sampled tokens at temperature 1, before filters; 0.0 where the mask is 0."""
    prompt_len: int
    """Tokens before the first that is trained."""
    reward: float
    """The rollout's score, the same in each of its samples."""
    advantage: float | None
    """The rollout's, relative to its group by `env.advantages`; None for a member without its group."""
    group_id: str
    rollout_id: str
    segment: int
    """Which sequence of its rollout this is, from 0."""
    last: bool
    """Whether it is the rollout's last."""
    weights: list[str | None]
    """Which weights sampled each of its turns, where the server says so: what staleness is measured by."""
    record: RolloutRecord = field(repr=False)
    """The whole rollout: messages, tools, metrics, how it ended."""
    token_advantages: list[float] | None = field(default=None, repr=False)
    """One for each token, only where `compute_reward` gives points per turn; then `advantage` alone is not enough."""

    def one_advantage(self) -> float:
        """For trainers that take one number per sequence; ConfigError when that would leave points per turn out."""
        if self.token_advantages is not None:
            raise ConfigError("this trainer takes one advantage per sequence: let compute_reward give no turn_rewards")
        return self.advantage or 0.0


def samples_of(
    rollouts: Sequence[ScoredRollout], segments: SegmentPolicy = "all", baseline: Baseline | None = "normalized"
) -> list[Sample]:
    """The samples of a group's rollouts, in order; without a `baseline` they are no whole group: no advantages."""
    outcomes: list[float | None] = [None] * len(rollouts)
    turns: list[list[float]] = [[] for _ in rollouts]
    if baseline is not None:
        outcomes = list(centered([_score(rollout.record) for rollout in rollouts], baseline))
        for rollout in rollouts:
            if rollout.turn_rewards:
                check_turn_rewards(rollout.turn_rewards, len(rollout.record.sampled_calls))
        turns = turn_advantages([rollout.turn_rewards for rollout in rollouts], baseline)
    return [
        sample
        for rollout, outcome, per_turn in zip(rollouts, outcomes, turns, strict=True)
        for sample in _samples(rollout.record, segments, outcome, per_turn)
    ]


def _samples(
    record: RolloutRecord, segments: SegmentPolicy, advantage: float | None, per_turn: Sequence[float]
) -> list[Sample]:
    if not record.has_tokens:
        raise ConfigError(f"rollout {record.rollout_id} has no tokens: openai.server_type must be one that gives them")
    final = len(record.segments) - 1
    if final and segments == "forbid":
        raise ConfigError(f"rollout {record.rollout_id} has {final + 1} segments, and `env.segments` is `forbid`")
    samples = []
    for index in range(0 if segments == "all" else final, final + 1):
        segment = record.segments[index]
        mask = [int(value != MASKED) for value in segment.masks]
        spread_out = spread(segment, index, record.sampled_calls, advantage or 0.0, per_turn) if per_turn else None
        samples.append(
            Sample(
                tokens=segment.tokens,
                mask=mask,
                logprobs=[value if kept else 0.0 for value, kept in zip(segment.logprobs, mask, strict=True)],
                prompt_len=mask.index(1) if 1 in mask else len(mask),
                reward=_score(record),
                advantage=advantage,
                group_id=record.group_id,
                rollout_id=record.rollout_id,
                segment=index,
                last=index == final,
                weights=[call.weights_version for call in record.sampled_calls if call.segment == index],
                record=record,
                token_advantages=spread_out,
            )
        )
    return samples


def _score(record: RolloutRecord) -> float:
    if record.score is None:
        raise ValueError(f"rollout {record.rollout_id} has no score")
    return record.score
