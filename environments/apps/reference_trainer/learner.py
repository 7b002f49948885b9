"""One training step: which rows of a batch are trained on, their gradient, the update, and what it measured.

No network and no files here: rows in, new adapter and figures out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from environments.apps.reference_trainer.adam import AdamState, adam_update, add_gradients, new_adam
from environments.apps.reference_trainer.control import apply_control
from environments.apps.reference_trainer.llama import Lora, Model
from environments.apps.reference_trainer.lora import new_lora
from environments.apps.reference_trainer.loss import TokenSums, loss_and_gradient
from environments.apps.reference_trainer.microbatches import microbatches
from environments.apps.reference_trainer.rows import Row, sampled_tokens
from environments.apps.reference_trainer.trainer_settings import TrainerSettings


@dataclass(frozen=True)
class State:
    """All that a step changes. `step` counts batches, and names the version of the weights; `updates` counts changes of
    the weights, which a batch without any signal does not make."""

    step: int
    updates: int
    lora: Lora
    adam: AdamState


@dataclass(frozen=True)
class StepFigures:
    """What one step measured. Differences and ratios are of the weights before the update."""

    step: int
    reward: float
    """Mean score of all rows."""
    rows: int
    """Rows trained on."""
    groups: int
    groups_without_signal: int
    rows_too_stale: int
    staleness_mean: float | None
    """Over all rows whose weights are known, in updates."""
    staleness_max: int | None
    tokens_trained: int
    loss: float = 0.0
    logprob_difference_mean: float | None = None
    """|recomputed - recorded| logprob of the trained tokens."""
    logprob_difference_max: float | None = None
    ratio_mean: float | None = None
    clipped_share: float | None = None
    gradient_norm: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)


class Learner:
    """Trains an adapter for one model."""

    def __init__(self, model: Model, settings: TrainerSettings) -> None:
        self.model = model
        self.settings = settings
        self.scale = settings.alpha / settings.rank

    def start(self) -> State:
        """An adapter that changes nothing yet."""
        lora = new_lora(self.model, self.settings.rank, self.settings.seed)
        return State(0, 0, lora, new_adam(lora))

    def train(self, state: State, rows: Sequence[Row]) -> tuple[State, StepFigures]:
        """One step on one batch."""
        step = state.step + 1
        fresh = [row for row in rows if self._staleness(state, row) <= self.settings.max_staleness]
        used = apply_control(self.settings.control, fresh, self.settings.seed, step)
        # A row without advantage has no gradient: most are of groups in which all rollouts did equally well.
        used = [row for row in used if row.advantages.any()]
        figures = self._count(state, step, rows, fresh, used)
        if not used:
            return State(step, state.updates, state.lora, state.adam), StepFigures(**figures)
        # The mean is over the whole batch: the fewer groups have anything to say, the smaller the step.
        gradient, measured = self._gradient(state.lora, used, sampled_tokens(fresh))
        updates = state.updates + 1
        lora, adam, norm = adam_update(
            state.lora,
            state.adam,
            gradient,
            float(updates),
            learning_rate=self.learning_rate(step),
            betas=(self.settings.adam_beta1, self.settings.adam_beta2),
            max_norm=self.settings.max_gradient_norm,
        )
        return State(step, updates, lora, adam), StepFigures(**figures, **measured, gradient_norm=float(norm))

    def learning_rate(self, step: int) -> float:
        """Of this step, counted from 1."""
        first, last = self.settings.learning_rate, self.settings.final_learning_rate
        return last + (first - last) * max(0.0, 1 - (step - 1) / max(1, self.settings.steps - 1))

    def _gradient(self, lora: Lora, rows: Sequence[Row], batch_tokens: int) -> tuple[Lora, dict[str, Any]]:
        total: Lora | None = None
        loss, sums = 0.0, []
        for batch in microbatches(rows, self.settings.microbatch_segments):
            (part, measured), gradient = loss_and_gradient(
                lora,
                self.model.weights,
                batch,
                float(batch_tokens),
                shape=self.model.shape,
                scale=self.scale,
                ratio_cap=self.settings.ratio_cap,
            )
            total = gradient if total is None else add_gradients(total, gradient)
            loss += float(part)
            sums.append(TokenSums(*map(float, measured)))
        assert total is not None
        tokens = sampled_tokens(rows)
        return total, {
            "loss": loss,
            "logprob_difference_mean": sum(s.difference for s in sums) / tokens,
            "logprob_difference_max": max(s.difference_max for s in sums),
            "ratio_mean": sum(s.ratio for s in sums) / tokens,
            "clipped_share": sum(s.clipped for s in sums) / tokens,
        }

    def _staleness(self, state: State, row: Row) -> int:
        return 0 if row.oldest_version is None else state.step - row.oldest_version

    def _count(
        self, state: State, step: int, rows: Sequence[Row], fresh: Sequence[Row], used: Sequence[Row]
    ) -> dict[str, Any]:
        known = [self._staleness(state, row) for row in rows if row.oldest_version is not None]
        groups = {row.group for row in rows}
        return {
            "step": step,
            "reward": float(np.mean([row.score for row in rows])),
            "rows": len(used),
            "groups": len(groups),
            "groups_without_signal": len(groups - {row.group for row in rows if row.advantages.any()}),
            "rows_too_stale": len(rows) - len(fresh),
            "staleness_mean": float(np.mean(known)) if known else None,
            "staleness_max": max(known, default=None),
            "tokens_trained": sampled_tokens(used),
        }
