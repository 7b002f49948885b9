"""A random llama of a few thousand weights as a GGUF that llama.cpp loads too, and rows for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

LAYERS, WIDTH, HEADS, KV_HEADS, INNER = 3, 64, 4, 2, 96
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("a b", "c d", "e f", "g h")
CONTROL, NORMAL = 3, 1


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + number) for number in range(len(others))]


VOCABULARY = [*SPECIAL, *byte_characters(), *(merge.replace(" ", "") for merge in MERGES)]


def write_tiny_llama(path: Path, seed: int = 0) -> Path:
    """Weights in F32, so that llama.cpp computes with 32-bit activations too."""
    import gguf

    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    _write_fields(writer)

    def add(name: str, *shape: int) -> None:
        random = (
            rng.standard_normal(shape) * (1.5 / np.sqrt(shape[-1])) if len(shape) > 1 else rng.uniform(0.8, 1.2, shape)
        )
        writer.add_tensor(f"{name}.weight", random.astype(np.float32))

    add("token_embd", len(VOCABULARY), WIDTH)
    add("output_norm", WIDTH)
    for i in range(LAYERS):
        add(f"blk.{i}.attn_norm", WIDTH)
        add(f"blk.{i}.ffn_norm", WIDTH)
        add(f"blk.{i}.attn_q", WIDTH, WIDTH)
        add(f"blk.{i}.attn_k", WIDTH * KV_HEADS // HEADS, WIDTH)
        add(f"blk.{i}.attn_v", WIDTH * KV_HEADS // HEADS, WIDTH)
        add(f"blk.{i}.attn_output", WIDTH, WIDTH)
        add(f"blk.{i}.ffn_gate", INNER, WIDTH)
        add(f"blk.{i}.ffn_up", INNER, WIDTH)
        add(f"blk.{i}.ffn_down", WIDTH, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_fields(writer: Any) -> None:
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([CONTROL] * len(SPECIAL) + [NORMAL] * (len(VOCABULARY) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def wire_group(
    rng: np.random.Generator,
    *,
    size: int = 4,
    beginning: list[int] | None = None,
    turns: int = 1,
    scores: list[float] | None = None,
    versions: list[list[str]] | None = None,
    name: str = "g",
) -> dict[str, Any]:
    """A group as it goes over the wire: a shared task, then `turns` sampled stretches with tool results between."""

    def ids(count: int) -> list[int]:
        return [int(i) for i in rng.integers(len(SPECIAL), len(VOCABULARY), count)]

    task = (beginning or []) + ids(6)
    rows: list[tuple[list[int], list[int], list[float]]] = []
    for number in range(size):
        tokens, masks, logprobs = list(task), [-100] * len(task), [1.0] * len(task)
        for turn in range(turns):
            # Lengths that depend on nothing random: every group has the same shapes, and compiles once.
            sampled, result = ids(3 + (number + turn) % 4), ids(number % 3 + 1) if turn + 1 < turns else []
            tokens += sampled + result
            masks += sampled + [-100] * len(result)
            logprobs += [float(-x) for x in rng.uniform(0.1, 6, len(sampled))] + [1.0] * len(result)
        rows.append((tokens, masks, logprobs))
    params = {"group_id": name, "rollout_ids": [f"{name}/{i}" for i in range(size)], "segments": [0] * size}
    return {
        "tokens": [row[0] for row in rows],
        "masks": [row[1] for row in rows],
        "inference_logprobs": [row[2] for row in rows],
        "scores": scores or [float(x) for x in rng.integers(0, 2, size - 2)] + [0.0, 1.0],
        "advantages": None,
        "messages": None,
        "generation_params": params | ({"weights_versions": versions} if versions else {}),
    }
