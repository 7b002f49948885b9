"""What each token id stands for, byte for byte, so that a stored rollout can be read without its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from agent_loop.model.tokens.template import Tokenizer, decode_ids
from agent_loop.records.record import Piece

_ONE_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_MARK = "▁"


class Vocabulary:
    """Pieces of one tokenizer. Each id is looked up once, whatever the number of rollouts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._fast: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._decoder = str(getattr(self._fast, "decoder", ""))
        self._known: dict[int, Piece] = {}

    def pieces(self, ids: Iterable[int]) -> dict[str, Piece]:
        """The pieces of these ids, by id as text: JSON has no other keys."""
        found: dict[str, Piece] = {}
        for token in sorted(set(ids)):
            if token not in self._known:
                self._known[token] = self._piece(token)
            found[str(token)] = self._known[token]
        return found

    def _piece(self, token: int) -> Piece:
        spelling = None if self._fast is None else self._fast.id_to_token(token)
        if spelling is None or token in self._tokenizer.added_tokens_decoder:
            return decode_ids(self._tokenizer, [token])
        if "ByteLevel" in self._decoder and all(letter in _byte_of_letter() for letter in spelling):
            return as_piece(bytes(_byte_of_letter()[letter] for letter in spelling))
        if byte := _ONE_BYTE.fullmatch(spelling):
            return as_piece(bytes([int(byte[1], 16)]))
        if _WORD_MARK in self._decoder:
            return str(spelling).replace(_WORD_MARK, " ")
        return decode_ids(self._tokenizer, [token])


def as_piece(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


@cache
def _byte_of_letter() -> dict[str, int]:
    """The letters that byte-level vocabularies write for bytes (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
