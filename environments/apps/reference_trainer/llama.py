"""The llama architecture in JAX, read from the GGUF that llama.cpp samples with: the same weights, dequantized.

Only what training needs: logprobs of given tokens after a given context, with LoRA on the upper layers. Weights are
arguments of the compiled functions; as constants inside they would be compiled in, which takes minutes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from environments.apps.reference_trainer.microbatches import Microbatch

LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NORMS = ("attn_norm", "ffn_norm")

Array = Any
"""A jax array."""
Lora = dict[str, dict[str, Array]]
"""Per linear map: `a` [layers, rank, in] and `b` [layers, out, rank], for the layers that learn."""


class UnsupportedModel(ValueError):
    """This GGUF needs something that is not computed here."""


class Shape(NamedTuple):
    """The sizes of the architecture; hashable, so that compiled functions can depend on them."""

    layers: int
    heads: int
    kv_heads: int
    head_width: int
    rope_base: float
    norm_epsilon: float


class Model(NamedTuple):
    """`weights`: embedding, output, norm, and the stacked layers: `lower` (frozen) and `upper` (with LoRA)."""

    shape: Shape
    weights: dict[str, Any]


def load_model(path: Path, first_layer: int) -> Model:
    """Read and dequantize; UnsupportedModel for anything but a plain llama."""
    reader = gguf.GGUFReader(path)
    shape = _shape(path, reader, first_layer)
    tensors = {t.name: np.asarray(gguf.dequantize(t.data, t.tensor_type), np.float32) for t in reader.tensors}

    def stack(layers: range) -> dict[str, Array]:
        return {
            name: jnp.asarray(np.stack([tensors[f"blk.{i}.{name}.weight"] for i in layers]))
            for name in (*LINEARS, *NORMS)
        }

    embedding = jnp.asarray(tensors["token_embd.weight"])
    weights = {
        "embedding": embedding,
        "output": jnp.asarray(tensors["output.weight"]) if "output.weight" in tensors else embedding,
        "norm": jnp.asarray(tensors["output_norm.weight"]),
        "lower": stack(range(first_layer)) if first_layer else None,
        "upper": stack(range(first_layer, shape.layers)),
    }
    return Model(shape, weights)


def new_lora(model: Model, rank: int, seed: int) -> Lora:
    """Random `a`, zero `b`: the adapter starts as the identity, and its first gradient reaches `b`."""
    rng = np.random.default_rng(seed)
    adapter = {}
    for name in LINEARS:
        layers, outputs, inputs = model.weights["upper"][name].shape
        random = rng.standard_normal((layers, rank, inputs)) / np.sqrt(inputs)
        adapter[name] = {
            "a": random.astype(np.float32),
            "b": np.zeros((layers, outputs, rank), np.float32),
        }
    return adapter


def _shape(path: Path, reader: Any, first_layer: int) -> Shape:
    def value(key: str) -> Any:
        return reader.fields[key].contents()

    architecture = value("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(f"{path.name} is a {architecture} model; the reference trainer computes llama only")
    width, heads = value("llama.embedding_length"), value("llama.attention.head_count")
    extra = [key for key in reader.fields if key.startswith("llama.rope.scaling.type")]
    if extra or any(t.name == "rope_freqs.weight" for t in reader.tensors) or width % heads:
        raise UnsupportedModel(f"{path.name} scales its positions or heads in a way that is not computed here")
    layers = value("llama.block_count")
    if not first_layer < layers:
        raise UnsupportedModel(f"first_layer is {first_layer}, but {path.name} has {layers} layers: none would learn")
    return Shape(
        layers,
        heads,
        value("llama.attention.head_count_kv"),
        width // heads,
        float(value("llama.rope.freq_base")),
        float(value("llama.attention.layer_norm_rms_epsilon")),
    )


def logprobs(shape: Shape, weights: dict[str, Any], lora: Lora, scale: float, batch: Microbatch) -> Array:
    """[M]: log p(target | everything before it in its row). Logits are computed only where a token is trained."""
    states = _hidden(shape, weights, lora, scale, batch)
    chosen = _rms_norm(states[batch.places], weights["norm"], shape.norm_epsilon)
    logits = chosen @ weights["output"].T
    of_targets = jnp.take_along_axis(logits, batch.targets[:, None], 1)[:, 0]
    return of_targets - jax.nn.logsumexp(logits, -1)


def _hidden(shape: Shape, weights: dict[str, Any], lora: Lora, scale: float, batch: Microbatch) -> Array:
    """[P + B * S, d]: states after the last layer. Prefix and segments go through the linear maps as one long list."""
    shared, (_, length) = len(batch.prefix), batch.segments.shape
    starts = shared + batch.parent_lengths
    positions = jnp.concatenate([jnp.arange(shared), (starts[:, None] + jnp.arange(length)).reshape(-1)])
    angles = _angles(shape, positions)
    hidden_keys = _hidden_keys(batch)
    states = weights["embedding"][jnp.concatenate([batch.prefix, batch.segments.reshape(-1)])]

    def layer(states: Array, own: tuple[dict[str, Array], Lora | None]) -> tuple[Array, None]:
        matrices, adapters = own

        def linear(name: str, inputs: Array) -> Array:
            outputs = inputs @ matrices[name].T
            if adapters is None:
                return outputs
            return outputs + (inputs @ adapters[name]["a"].T) @ adapters[name]["b"].T * scale

        normed = _rms_norm(states, matrices["attn_norm"], shape.norm_epsilon)
        query = _rotate(linear("attn_q", normed).reshape(-1, shape.heads, shape.head_width), angles)
        key = _rotate(linear("attn_k", normed).reshape(-1, shape.kv_heads, shape.head_width), angles)
        value = linear("attn_v", normed).reshape(-1, shape.kv_heads, shape.head_width)
        query = query / np.sqrt(shape.head_width)
        parts = [_segments_attention(query[shared:], key, value, batch, hidden_keys)]
        if shared:
            parts.insert(0, _prefix_attention(query[:shared], key[:shared], value[:shared]))
        states = states + linear("attn_output", jnp.concatenate(parts))
        normed = _rms_norm(states, matrices["ffn_norm"], shape.norm_epsilon)
        gated = jax.nn.silu(linear("ffn_gate", normed)) * linear("ffn_up", normed)
        return states + linear("ffn_down", gated), None

    if weights["lower"] is not None:
        states, _ = jax.lax.scan(layer, states, (weights["lower"], None))
    states, _ = jax.lax.scan(layer, states, (weights["upper"], lora))
    return states


def _hidden_keys(batch: Microbatch) -> Array:
    """[B, S, P + S + S]: -1e9 for the keys that a token must not see: padding of its parent, and later tokens."""
    shared, (count, length) = len(batch.prefix), batch.segments.shape
    steps = jnp.arange(length)
    of_parent = steps >= batch.parent_lengths[:, None, None]
    of_own = steps > steps[:, None]
    shapes = ((count, length, shared), (count, length, length), (count, length, length))
    seen = (jnp.zeros((), bool), of_parent, of_own)
    hidden = jnp.concatenate([jnp.broadcast_to(part, size) for part, size in zip(seen, shapes, strict=True)], -1)
    return jnp.where(hidden, -1e9, 0.0)


def _prefix_attention(query: Array, key: Array, value: Array) -> Array:
    """[P, heads * width]: each token of the prefix sees those before it."""
    count, heads, width = key.shape
    grouped = query.reshape(count, heads, -1, width)
    causal = jnp.where(jnp.tril(jnp.ones((count, count), bool)), 0.0, -1e9)
    attention = jax.nn.softmax(jnp.einsum("pkgd,tkd->kgpt", grouped, key) + causal, -1)
    return jnp.einsum("kgpt,tkd->pkgd", attention, value).reshape(count, -1)


def _segments_attention(query: Array, key: Array, value: Array, batch: Microbatch, hidden_keys: Array) -> Array:
    """[B * S, heads * width]: each token sees the prefix, its segment's parent, and its segment up to itself.

    Query heads that share a key head are laid out as if they were tokens: few, large matrix products."""
    shared, (count, length) = len(batch.prefix), batch.segments.shape
    heads, width = key.shape[1:]
    grouped = query.reshape(count, length, heads, -1, width).transpose(2, 0, 3, 1, 4).reshape(heads, count, -1, width)

    def split(keys: Array) -> tuple[Array, Array, Array]:
        own = keys[shared:].reshape(count, length, heads, width).transpose(2, 0, 1, 3)
        return keys[:shared].transpose(1, 0, 2), own[:, batch.parents], own

    prefix_key, parent_key, own_key = split(key)
    prefix_value, parent_value, own_value = split(value)
    to_prefix = jnp.einsum("kbqd,ktd->kbqt", grouped, prefix_key)
    to_parent = jnp.einsum("kbqd,kbtd->kbqt", grouped, parent_key)
    to_own = jnp.einsum("kbqd,kbtd->kbqt", grouped, own_key)
    scores = jnp.concatenate([to_prefix, to_parent, to_own], -1).reshape(heads, count, -1, length, shared + 2 * length)
    attention = jax.nn.softmax(scores + hidden_keys[:, None], -1).reshape(heads, count, -1, shared + 2 * length)
    on_prefix, on_parent, on_own = jnp.split(attention, (shared, shared + length), -1)
    mixed = jnp.einsum("kbqt,ktd->kbqd", on_prefix, prefix_value)
    mixed += jnp.einsum("kbqt,kbtd->kbqd", on_parent, parent_value)
    mixed += jnp.einsum("kbqt,kbtd->kbqd", on_own, own_value)
    return mixed.reshape(heads, count, -1, length, width).transpose(1, 3, 0, 2, 4).reshape(count * length, -1)


def _angles(shape: Shape, positions: Array) -> tuple[Array, Array]:
    """Cosine and sine of each position and pair: [N, 1, width / 2]."""
    half = shape.head_width // 2
    angles = positions[:, None, None] * shape.rope_base ** (-jnp.arange(half) / half)
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(vectors: Array, angles: tuple[Array, Array]) -> Array:
    """ggml's normal rope: pairs are neighbours (2i, 2i + 1). A GGUF stores the rows of q and k in the order for it, so
    an adapter trained on them fits llama.cpp as it is."""
    cosine, sine = angles
    even, odd = vectors[..., 0::2], vectors[..., 1::2]
    return jnp.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).reshape(vectors.shape)


def _rms_norm(states: Array, gain: Array, epsilon: float) -> Array:
    return states * jax.lax.rsqrt((states * states).mean(-1, keepdims=True) + epsilon) * gain
