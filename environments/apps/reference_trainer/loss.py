"""GRPO's loss over the trained tokens of a step, and what the same forward pass tells about the pipeline.

    loss = - sum over tokens of  advantage * weight * log p(token)  /  sampled tokens of the batch

`weight` is p_trainer / p_sampler of the token, truncated, and a constant for the gradient: it corrects for weights that
were older or quantized when the token was sampled. Before an update and with the sampler's own weights it is 1 but for
rounding, which makes |log p - recorded log p| a check of everything in between: tokens, masks, order, versions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from environments.apps.reference_trainer.llama import Array, Lora, Shape, logprobs
from environments.apps.reference_trainer.microbatches import Microbatch


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
