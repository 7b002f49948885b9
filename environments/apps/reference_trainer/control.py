"""Negative controls: one thing on the way to the gradient is wrong on purpose, and then nothing must be learned."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agent_loop.model.tokens.ledger import MASKED, NO_LOGPROB
from environments.apps.reference_trainer.rows import Row
from environments.apps.reference_trainer.trainer_settings import Control


def apply_control(control: Control, rows: list[Row], seed: int, step: int) -> list[Row]:
    """The rows as the control leaves them; the same for the same seed and step."""
    if control == "shuffled":
        return shuffled(rows, np.random.default_rng((seed, step)))
    if control == "shifted":
        return [shifted(row) for row in rows]
    return rows


def shuffled(rows: list[Row], rng: np.random.Generator) -> list[Row]:
    """The advantages of a batch change rows, each within its group: everything stays but which rollout earned what.

    Across groups they would not add up to nothing in each: whole groups would be pushed away at random, and the model
    would forget how to speak, which shows less."""
    means = np.array([row.advantages[row.trained].mean() for row in rows], np.float32)
    groups = np.array([row.group for row in rows])
    for group in np.unique(groups):
        means[groups == group] = rng.permutation(means[groups == group])
    return [
        replace(row, advantages=np.where(row.labels != MASKED, mean, 0).astype(np.float32))
        for row, mean in zip(rows, means, strict=True)
    ]


def shifted(row: Row) -> Row:
    """Labels and all that belongs to them one place too late: the classic error of taking the logits at a token's own
    place. The last label falls off."""
    return replace(
        row,
        labels=np.concatenate([[MASKED], row.labels[:-1]]).astype(np.int32),
        logprobs=np.concatenate([[NO_LOGPROB], row.logprobs[:-1]]).astype(np.float32),
        advantages=np.concatenate([[0], row.advantages[:-1]]).astype(np.float32),
    )
