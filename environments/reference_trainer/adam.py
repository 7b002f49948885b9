"""Adam, as in the paper."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from environments.reference_trainer.model import Array, Lora

EPSILON = 1e-8


class AdamState(NamedTuple):
    """Running means of the gradient and of its square."""

    mean: Lora
    square: Lora


def new_adam(lora: Lora) -> AdamState:
    """Nothing seen yet."""
    zeros = jax.tree.map(jnp.zeros_like, lora)
    return AdamState(zeros, zeros)


def gradient_norm(gradient: Lora) -> Array:
    """Euclidean length of all entries together."""
    return jnp.sqrt(sum((entry * entry).sum() for entry in jax.tree.leaves(gradient)))


def _update(
    lora: Lora, state: AdamState, gradient: Lora, updates: float, learning_rate: float, betas: tuple[float, float]
) -> tuple[Lora, AdamState]:
    beta1, beta2 = betas
    mean = jax.tree.map(lambda m, g: beta1 * m + (1 - beta1) * g, state.mean, gradient)
    square = jax.tree.map(lambda v, g: beta2 * v + (1 - beta2) * g * g, state.square, gradient)

    def moved(parameter: Array, m: Array, v: Array) -> Any:
        return parameter - learning_rate * (m / (1 - beta1**updates)) / (jnp.sqrt(v / (1 - beta2**updates)) + EPSILON)

    return jax.tree.map(moved, lora, mean, square), AdamState(mean, square)


adam_update = jax.jit(_update, static_argnames=("learning_rate", "betas"))
"""(lora, state) after the `updates`-th update; counted from 1."""
