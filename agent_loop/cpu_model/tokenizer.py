"""The model's own tokenizer, built from the vocabulary inside its GGUF: no torch, no hub, the server's own ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agent_loop.cpu_model.metadata import read_metadata

CONTROL = 3
"""GGUF's token type for special tokens."""
DIGIT_BY_DIGIT = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""Pre-tokenizers that split every digit and are otherwise GPT-2's."""


def gguf_tokenizer(path: Path) -> Any:
    """A `tokenizers.Tokenizer` for a byte-level BPE GGUF; raises ValueError for kinds that are not known here."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    fields = read_metadata(path)
    kind = fields["tokenizer.ggml.model"]
    pre = fields["tokenizer.ggml.pre"]
    if kind != "gpt2" or pre not in DIGIT_BY_DIGIT:
        raise ValueError(f"{path.name}: tokenizer {kind}/{pre} is not one that can be built from its GGUF here")
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, token_type in zip(tokens, types, strict=True) if token_type == CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def transformers_tokenizer(path: Path, chat_template: str) -> Any:
    """The same as transformers wants it, with a chat template."""
    from transformers import PreTrainedTokenizerFast

    fields = read_metadata(path)
    tokens = fields["tokenizer.ggml.tokens"]
    eos, bos = (tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for name in ("eos", "bos"))
    built = PreTrainedTokenizerFast(tokenizer_object=gguf_tokenizer(path), eos_token=eos, bos_token=bos)
    built.chat_template = chat_template
    return built
