"""A batch of run-api as rows: one row is one whole token sequence, and what is to be learned from it.

The wire, per group: `tokens`, `masks`, `inference_logprobs` (one list per sequence, all of the same length), `scores`,
`advantages` (per token, or null), and in `generation_params` the `rollout_ids` and `weights_versions` of each sequence.
A rollout of several turns is one row with several unmasked stretches; one whose context was truncated is several rows.

Negative controls (`apply_control`) make one thing wrong on purpose; then nothing must be learned.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.model.tokens.ledger import MASKED, NO_LOGPROB
from environments.apps.reference_trainer.trainer_settings import Control


def group_advantages(scores: Sequence[float], rollouts: Sequence[Hashable], std_floor: float) -> list[float]:
    """One number per sequence; zeros when all rollouts of the group scored the same."""
    by_rollout = dict(zip(rollouts, scores, strict=True))
    mean, deviation = fmean(by_rollout.values()), pstdev(by_rollout.values())
    if len(set(by_rollout.values())) == 1:
        return [0.0] * len(scores)
    return [(score - mean) / (deviation + std_floor) for score in scores]


Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class BadBatch(ValueError):
    """The batch cannot be trained on; the message names the sequence."""


@dataclass(frozen=True)
class TrainingRow:
    """One sequence. The four arrays have one entry per token."""

    tokens: Ints
    labels: Ints
    """The wire's `masks`: the sampled token itself where it was sampled, MASKED where it was only read."""
    logprobs: Floats
    """Of the sampler, at the moment of sampling; meaningless where masked."""
    advantages: Floats
    """0 where masked."""
    score: float
    group: int
    """Index in the batch."""
    oldest_version: int | None
    """Number of the oldest weights that sampled a part of it; None when the sampler did not say."""

    @property
    def trained(self) -> NDArray[np.intp]:
        """Places of the sampled tokens. The logits that chose the token at place i are those of place i - 1."""
        return np.flatnonzero(self.labels != MASKED)


def sampled_tokens(rows: Sequence[TrainingRow]) -> int:
    """Tokens of these rows that were sampled, and so can be trained on."""
    return sum(len(row.trained) for row in rows)


def read_batch(batch: Sequence[Mapping[str, Any]], std_floor: float) -> list[TrainingRow]:
    return [row for index, group in enumerate(batch) for row in _read_group(index, group, std_floor)]


def _read_group(index: int, group: Mapping[str, Any], std_floor: float) -> list[TrainingRow]:
    params = group.get("generation_params") or {}
    count = len(group["tokens"])
    rollouts = params.get("rollout_ids") or list(range(count))
    versions = params.get("weights_versions") or [[]] * count
    given = group.get("advantages")
    outcomes = group_advantages(group["scores"], rollouts, std_floor)
    rows = []
    for i in range(count):
        labels = np.asarray(group["masks"][i], np.int32)
        sampled = labels != MASKED
        row = TrainingRow(
            tokens=np.asarray(group["tokens"][i], np.int32),
            labels=labels,
            logprobs=np.asarray(group["inference_logprobs"][i], np.float32),
            advantages=np.where(sampled, outcomes[i] if given is None else given[i], 0).astype(np.float32),
            score=float(group["scores"][i]),
            group=index,
            oldest_version=oldest_version(versions[i]),
        )
        if not sampled.any() or sampled[0]:
            what = "is sampled from nothing" if sampled.any() else "has no sampled token"
            raise BadBatch(f"sequence {i} of group {params.get('group_id', index)} {what}")
        rows.append(row)
    return rows


def oldest_version(versions: Sequence[str | None]) -> int | None:
    """The smallest number in names such as `7` or `smollm2@7`; None when the weights of a turn are not known."""
    numbers = [(name or "").rsplit("@", 1)[-1] for name in versions]
    if not numbers or not all(number.isdecimal() for number in numbers):
        return None
    return min(map(int, numbers))


def apply_control(control: Control, rows: list[TrainingRow], seed: int, step: int) -> list[TrainingRow]:
    """The rows as the control changes them; the same for the same seed and step."""
    if control == "shuffled":
        return shuffled(rows, np.random.default_rng((seed, step)))
    if control == "shifted":
        return [shifted(row) for row in rows]
    return rows


def shuffled(rows: list[TrainingRow], rng: np.random.Generator) -> list[TrainingRow]:
    """Advantages change rows within their group: only which rollout earned what is wrong.

    Across groups they would not add up to zero in each: whole groups would be made less likely at random, and the model
    would unlearn its language, which shows less."""
    means = np.array([row.advantages[row.trained].mean() for row in rows], np.float32)
    groups = np.array([row.group for row in rows])
    for group in np.unique(groups):
        means[groups == group] = rng.permutation(means[groups == group])
    return [
        replace(row, advantages=np.where(row.labels != MASKED, mean, 0).astype(np.float32))
        for row, mean in zip(rows, means, strict=True)
    ]


def shifted(row: TrainingRow) -> TrainingRow:
    """Labels, logprobs and advantages one place too late, the classic error of taking the logits at a token's own
    place. The last label is lost."""
    return replace(
        row,
        labels=np.concatenate([[MASKED], row.labels[:-1]]).astype(np.int32),
        logprobs=np.concatenate([[NO_LOGPROB], row.logprobs[:-1]]).astype(np.float32),
        advantages=np.concatenate([[0], row.advantages[:-1]]).astype(np.float32),
    )
