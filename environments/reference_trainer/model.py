"""The llama architecture in JAX, straight from the GGUF that llama.cpp samples with: the same weights, dequantized.

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

from environments.reference_trainer.microbatches import Microbatch

LINEARS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
NORMS = ("attn_norm", "ffn_norm")

Array = Any
"""A jax array."""
Lora = dict[str, dict[str, Array]]
"""Per linear map: `a` [layers, rank, in] and `b` [layers, out, rank], for the layers that learn."""


class UnsupportedModel(ValueError):
    """This GGUF holds something that is not computed here."""


class Shape(NamedTuple):
    """The numbers of the architecture; hashable, so that compiled functions can depend on them."""

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
    """Read and dequantize; raises UnsupportedModel for what is not a plain llama."""
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
    """[M]: log p(target | everything before it in its row). The vocabulary is touched only where a token is trained."""
    states = _hidden(shape, weights, lora, scale, batch.prefix, batch.suffixes)
    chosen = _rms_norm(states[batch.places], weights["norm"], shape.norm_epsilon)
    logits = chosen @ weights["output"].T
    of_targets = jnp.take_along_axis(logits, batch.targets[:, None], 1)[:, 0]
    return of_targets - jax.nn.logsumexp(logits, -1)


def _hidden(shape: Shape, weights: dict[str, Any], lora: Lora, scale: float, prefix: Array, suffixes: Array) -> Array:
    """[R * S, d]: states behind the last layer. Prefix and suffixes go through the linear maps as one long list."""
    (shared,), (rows, length) = prefix.shape, suffixes.shape
    positions = jnp.concatenate([jnp.arange(shared), jnp.tile(shared + jnp.arange(length), rows)])
    angles = _angles(shape, positions)
    states = weights["embedding"][jnp.concatenate([prefix, suffixes.reshape(-1)])]

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
        states = states + linear("attn_output", _attention(shape, query, key, value, shared, rows))
        normed = _rms_norm(states, matrices["ffn_norm"], shape.norm_epsilon)
        gated = jax.nn.silu(linear("ffn_gate", normed)) * linear("ffn_up", normed)
        return states + linear("ffn_down", gated), None

    if weights["lower"] is not None:
        states, _ = jax.lax.scan(layer, states, (weights["lower"], None))
    states, _ = jax.lax.scan(layer, states, (weights["upper"], lora))
    return states[shared:]


def _attention(shape: Shape, query: Array, key: Array, value: Array, shared: int, rows: int) -> Array:
    """Causal attention: the prefix sees itself; each row sees the prefix and itself. [P + R * S, heads * width]."""
    heads, width = shape.kv_heads, shape.head_width
    query = query.reshape(-1, heads, shape.heads // heads, width) / np.sqrt(width)
    own_query = query[shared:].reshape(rows, -1, heads, shape.heads // heads, width)
    own_key, own_value = (x[shared:].reshape(rows, -1, heads, width) for x in (key, value))
    to_own = _causal(jnp.einsum("rskgd,rtkd->rkgst", own_query, own_key))
    if not shared:
        own = jnp.einsum("rkgst,rtkd->rskgd", jax.nn.softmax(to_own, -1), own_value)
        return own.reshape(-1, shape.heads * width)
    query, key, value = query[:shared], key[:shared], value[:shared]
    among = jax.nn.softmax(_causal(jnp.einsum("pkgd,tkd->kgpt", query, key)), -1)
    before = jnp.einsum("kgpt,tkd->pkgd", among, value)
    to_prefix = jnp.einsum("rskgd,tkd->rkgst", own_query, key)
    attention = jax.nn.softmax(jnp.concatenate([to_prefix, to_own], -1), -1)
    own = jnp.einsum("rkgst,tkd->rskgd", attention[..., :shared], value)
    own += jnp.einsum("rkgst,rtkd->rskgd", attention[..., shared:], own_value)
    return jnp.concatenate([before.reshape(shared, -1), own.reshape(-1, shape.heads * width)])


def _causal(scores: Array) -> Array:
    length = scores.shape[-1]
    return jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)


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
