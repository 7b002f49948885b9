"""The model's own tokenizer, built from the vocabulary inside its GGUF: no torch, no hub, the server's own ids."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
STRING, ARRAY = 8, 9
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's value types by number, as struct codes."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Every key of the header; raises ValueError when the file is not GGUF."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:4] != MAGIC:
            raise ValueError(f"{path}: not a GGUF file")
        reader = _Reader(data, 8)
        _tensors, count = reader.scalar("Q"), reader.scalar("Q")
        return {reader.string(): reader.value(reader.scalar("I")) for _ in range(count)}


class _Reader:
    """A position in the file."""

    def __init__(self, data: mmap.mmap, position: int) -> None:
        self._data, self._position = data, position

    def scalar(self, code: str) -> Any:
        """One number."""
        (value,) = self._unpack(f"<{code}")
        return value

    def string(self) -> str:
        """A length and that many bytes."""
        size = self.scalar("Q")
        start, self._position = self._position, self._position + size
        return self._data[start : start + size].decode("utf-8")

    def value(self, kind: int) -> Any:
        """A value of a given type; arrays may nest."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.scalar(SCALARS[kind])
        inner, count = self.scalar("I"), self.scalar("Q")
        if inner in SCALARS:
            return list(self._unpack(f"<{count}{SCALARS[inner]}"))
        return [self.value(inner) for _ in range(count)]

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return values


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
