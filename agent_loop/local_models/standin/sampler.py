"""The stand-in's "model": a policy's text as token ids, with logprobs that depend on every id before them.

Like a real model's, a logprob changes when anything in the prefix changes, so a doubled or missing token is noticed by
`verify --against` here too. Like a real model, it does not always write a text with the tokens the tokenizer would use.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from random import Random

from agent_loop.local_models.standin.policies import Reply
from agent_loop.model.tokens.template import Tokenizer, decode_ids

REMEMBERED = 4096
"""Texts and tokens whose writing is remembered."""


@dataclass(frozen=True)
class Sample:
    """One sampled continuation."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str


def fingerprint(ids: Sequence[int], before: int = 0) -> int:
    """A number that depends on every id, in order; continues from `before`."""
    return zlib.crc32(struct.pack(f"<{len(ids)}I", *ids), before)


def logprobs_of(ids: Sequence[int], prefix: Sequence[int] = ()) -> list[float]:
    """The logprob of each id after the prefix and the ids before it."""
    state = fingerprint(prefix)
    found = []
    for token in ids:
        state = zlib.crc32(token.to_bytes(4, "little"), state)  # as `fingerprint` would, a token at a time
        found.append(-(state % 40_000 + 1) / 10_000)
    return found


class Writer:
    """Writes replies as sampled tokens. Scripted policies repeat themselves: what was tokenized once is remembered."""

    def __init__(self, tokenizer: Tokenizer, split_share: float) -> None:
        """`split_share` of the tokens are written as two smaller ones."""
        self._tokenizer = tokenizer
        self._split_share = split_share
        self._encode = lru_cache(REMEMBERED)(partial(tokenizer.encode, add_special_tokens=False))
        self._halves = lru_cache(REMEMBERED)(self._halves_of)

    def write(self, reply: Reply, prompt_ids: Sequence[int], rng: Random, *, max_tokens: int) -> Sample:
        """A policy's reply as sampled tokens."""
        ids = self._split(self._encode(reply.text), rng)
        finish = "length"
        if reply.ended and self._tokenizer.eos_token_id is not None:
            ids, finish = [*ids, self._tokenizer.eos_token_id], "stop"
        if len(ids) > max_tokens:
            ids, finish = ids[:max_tokens], "length"
        spoken = ids[:-1] if finish == "stop" else ids
        return Sample(ids, logprobs_of(ids, prompt_ids), finish, decode_ids(self._tokenizer, spoken))

    def _split(self, ids: Sequence[int], rng: Random) -> list[int]:
        """The same text, with some tokens written as two smaller ones."""
        written: list[int] = []
        for token in ids:
            ways = self._halves(token) if rng.random() < self._split_share else ()
            written.extend(rng.choice(ways) if ways else (token,))
        return written

    def _halves_of(self, token: int) -> list[list[int]]:
        """Every way to write a token as two."""
        text = self._tokenizer.decode([token])
        if not text.isascii() or token in self._tokenizer.added_tokens_decoder:
            return []
        cuts = [(text[:cut], text[cut:]) for cut in range(1, len(text))]
        ways = [[self._encode(left), self._encode(right)] for left, right in cuts]
        return [left + right for left, right in ways if len(left) == len(right) == 1]
