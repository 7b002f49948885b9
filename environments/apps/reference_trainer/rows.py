"""A batch as run-api hands it out, read into rows: one row is one whole token sequence and what is to be learned of it.

The wire, per group: `tokens`, `masks`, `inference_logprobs` (one list per sequence, all of the same length), `scores`,
`advantages` (per token, or null), and in `generation_params` the `rollout_ids` and `weights_versions` of each sequence.
A rollout of several turns is one row with several unmasked stretches; one whose context was truncated is several rows.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent_loop.model.tokens.ledger import MASKED


def group_advantages(scores: Sequence[float], rollouts: Sequence[Hashable], std_floor: float) -> list[float]:
    """One number per sequence; zeros when all rollouts of the group did equally well."""
    by_rollout = dict(zip(rollouts, scores, strict=True))
    mean, deviation = fmean(by_rollout.values()), pstdev(by_rollout.values())
    if len(set(by_rollout.values())) == 1:
        return [0.0] * len(scores)
    return [(score - mean) / (deviation + std_floor) for score in scores]


Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


class BadBatch(ValueError):
    """The batch can not be trained on; the message names the sequence."""


@dataclass(frozen=True)
class Row:
    """One sequence. The four arrays are as long as each other, and speak of the token at the same place."""

    tokens: Ints
    labels: Ints
    """The wire's `masks`: the sampled token itself where it was sampled, MASKED where it was only read."""
    logprobs: Floats
    """What the sampler gave to its own token, at the moment of sampling; meaningless where masked."""
    advantages: Floats
    """0 where masked."""
    score: float
    group: int
    """Index in the batch."""
    oldest_version: int | None
    """Number of the oldest weights that sampled a part of it; None when the sampler did not say."""

    @property
    def trained(self) -> NDArray[np.intp]:
        """Places of the sampled tokens. The logits that chose the token at place i stand at place i - 1."""
        return np.flatnonzero(self.labels != MASKED)


def sampled_tokens(rows: Sequence[Row]) -> int:
    """Tokens of these rows that were sampled, and so can be trained."""
    return sum(len(row.trained) for row in rows)


def read_batch(batch: Sequence[Mapping[str, Any]], std_floor: float) -> list[Row]:
    """All rows of a batch, with their advantages."""
    return [row for index, group in enumerate(batch) for row in _read_group(index, group, std_floor)]


def _read_group(index: int, group: Mapping[str, Any], std_floor: float) -> list[Row]:
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
        row = Row(
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
    """The smallest number among names like `7` or `smollm2@7`; None when a turn's weights are not known."""
    numbers = [(name or "").rsplit("@", 1)[-1] for name in versions]
    if not numbers or not all(number.isdecimal() for number in numbers):
        return None
    return min(map(int, numbers))
