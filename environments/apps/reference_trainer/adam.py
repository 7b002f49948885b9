"""Adam, as in the paper; a gradient longer than `max_norm` is shortened to it first."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from environments.apps.reference_trainer.llama import Array, Lora

EPSILON = 1e-8


class AdamState(NamedTuple):
    """Running means of the gradient and of its square."""

    mean: Lora
    square: Lora


def new_adam(lora: Lora) -> AdamState:
    """Nothing seen yet."""
    zeros = {name: {part: np.zeros_like(array) for part, array in parts.items()} for name, parts in lora.items()}
    return AdamState(zeros, zeros)


def _add(one: Lora, other: Lora) -> Any:
    return jax.tree.map(jnp.add, one, other)


def _update(
    lora: Lora,
    state: AdamState,
    gradient: Lora,
    updates: float,
    learning_rate: float,
    betas: tuple[float, float],
    max_norm: float | None,
) -> tuple[Lora, AdamState, Array]:
    norm = jnp.sqrt(sum((entry * entry).sum() for entry in jax.tree.leaves(gradient)))
    if max_norm is not None:
        gradient = jax.tree.map(lambda entry: entry * jnp.minimum(1, max_norm / norm), gradient)
    beta1, beta2 = betas
    mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mean, gradient)
    square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.square, gradient)

    def moved(parameter: Array, m: Array, v: Array) -> Array:
        return parameter - learning_rate * (m / (1 - beta1**updates)) / (jnp.sqrt(v / (1 - beta2**updates)) + EPSILON)

    return jax.tree.map(moved, lora, mean, square), AdamState(mean, square), norm


add_gradients = jax.jit(_add)
adam_update = jax.jit(_update, static_argnames=("learning_rate", "betas", "max_norm"))
"""(lora, state, norm of the gradient) after the `updates`-th update, counted from 1."""
