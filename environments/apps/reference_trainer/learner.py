"""One training step: which rows of a batch are used, GRPO's loss and gradient, Adam's update, and what was measured.

    loss = - sum over tokens of  advantage * weight * log p(token)  /  sampled tokens of the batch

`weight` is p_trainer / p_sampler of the token, truncated, and a constant for the gradient: it corrects for weights that
were older or quantized when the token was sampled. Before an update and with the sampler's own weights it is 1 except
for rounding, so |log p - recorded log p| checks everything in between: tokens, masks, order, versions.

No network and no files here: rows in, new adapter and figures out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from environments.apps.reference_trainer.llama import Array, Lora, Model, Shape, logprobs, new_lora
from environments.apps.reference_trainer.microbatches import Microbatch, microbatches
from environments.apps.reference_trainer.rows import TrainingRow, apply_control, sampled_tokens
from environments.apps.reference_trainer.trainer_settings import TrainerSettings

EPSILON = 1e-8


class AdamState(NamedTuple):
    """Running means of the gradient and of its square."""

    mean: Lora
    square: Lora


@dataclass(frozen=True)
class State:
    """All that a step changes. `step` counts batches, and names the version of the weights; `updates` counts changes of
    the weights: a batch without any signal makes none."""

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
        return asdict(self)


class Learner:
    def __init__(self, model: Model, settings: TrainerSettings) -> None:
        self.model = model
        self.settings = settings
        self.scale = settings.alpha / settings.rank

    def start(self) -> State:
        """A new adapter, which changes nothing yet."""
        lora = new_lora(self.model, self.settings.rank, self.settings.seed)
        return State(0, 0, lora, new_adam(lora))

    def train(self, state: State, rows: Sequence[TrainingRow]) -> tuple[State, StepFigures]:
        step = state.step + 1
        fresh = [row for row in rows if self._staleness(state, row) <= self.settings.max_staleness]
        used = apply_control(self.settings.control, fresh, self.settings.seed, step)
        # A row without advantage has no gradient: mostly of groups in which all rollouts scored the same.
        used = [row for row in used if row.advantages.any()]
        figures = self._count(state, step, rows, fresh, used)
        if not used:
            return State(step, state.updates, state.lora, state.adam), StepFigures(**figures)
        # The mean is over the whole batch: the fewer groups have a signal, the smaller the step.
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
        """Falls in a straight line; steps are counted from 1."""
        first, last = self.settings.learning_rate, self.settings.final_learning_rate
        return last + (first - last) * max(0.0, 1 - (step - 1) / max(1, self.settings.steps - 1))

    def _gradient(self, lora: Lora, rows: Sequence[TrainingRow], batch_tokens: int) -> tuple[Lora, dict[str, Any]]:
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

    def _staleness(self, state: State, row: TrainingRow) -> int:
        return 0 if row.oldest_version is None else state.step - row.oldest_version

    def _count(
        self,
        state: State,
        step: int,
        rows: Sequence[TrainingRow],
        fresh: Sequence[TrainingRow],
        used: Sequence[TrainingRow],
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


class TokenSums(NamedTuple):
    """Sums over the trained tokens of a microbatch; `difference_max` is a maximum."""

    difference: Array
    difference_max: Array
    ratio: Array
    clipped: Array


def grpo_loss(
    lora: Lora,
    weights: dict[str, Any],
    batch: Microbatch,
    batch_tokens: float,
    shape: Shape,
    scale: float,
    ratio_cap: float,
) -> tuple[Array, TokenSums]:
    """This microbatch's part of the step's loss: the parts, and their gradients, simply add up."""
    own = logprobs(shape, weights, lora, scale, batch)
    difference = (own - batch.recorded) * batch.valid
    ratio = jnp.exp(jax.lax.stop_gradient(difference))
    weight = jnp.minimum(ratio, ratio_cap)
    loss = -(batch.valid * batch.advantages * weight * own).sum() / batch_tokens
    sums = TokenSums(
        difference=jnp.abs(difference).sum(),
        difference_max=jnp.abs(difference).max(),
        ratio=(ratio * batch.valid).sum(),
        clipped=((ratio > ratio_cap) * batch.valid).sum(),
    )
    return loss, sums


loss_and_gradient = jax.jit(
    jax.value_and_grad(grpo_loss, has_aux=True), static_argnames=("shape", "scale", "ratio_cap")
)
"""((loss, sums), gradient with respect to the adapter)."""


def new_adam(lora: Lora) -> AdamState:
    zeros = {name: {part: np.zeros_like(array) for part, array in parts.items()} for name, parts in lora.items()}
    return AdamState(zeros, zeros)


def _add_gradients(one: Lora, other: Lora) -> Any:
    return jax.tree.map(jnp.add, one, other)


def _adam_update(
    lora: Lora,
    state: AdamState,
    gradient: Lora,
    updates: float,
    learning_rate: float,
    betas: tuple[float, float],
    max_norm: float | None,
) -> tuple[Lora, AdamState, Array]:
    """Adam as in the paper; a gradient longer than `max_norm` is shortened to it first."""
    norm = jnp.sqrt(sum((entry * entry).sum() for entry in jax.tree.leaves(gradient)))
    if max_norm is not None:
        gradient = jax.tree.map(lambda entry: entry * jnp.minimum(1, max_norm / norm), gradient)
    beta1, beta2 = betas
    mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mean, gradient)
    square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.square, gradient)

    def moved(parameter: Array, m: Array, v: Array) -> Array:
        return parameter - learning_rate * (m / (1 - beta1**updates)) / (jnp.sqrt(v / (1 - beta2**updates)) + EPSILON)

    return jax.tree.map(moved, lora, mean, square), AdamState(mean, square), norm


add_gradients = jax.jit(_add_gradients)
adam_update = jax.jit(_adam_update, static_argnames=("learning_rate", "betas", "max_norm"))
"""(lora, state, norm of the gradient) after the `updates`-th update, counted from 1."""
