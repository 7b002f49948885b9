"""The stand-in's "model": a policy's text as token ids, with logprobs that depend on every id before them.

Like a real model's, a logprob changes when anything in the prefix changes, so a doubled or missing token is noticed by
`verify --against` here too. Like a real model, it does not always write a text with the tokens the tokenizer would use.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from agent_loop.standin.policies import Reply
from agent_loop.tokens.template import Tokenizer


@dataclass(frozen=True)
class Sample:
    """One sampled continuation."""

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    text: str


def fingerprint(ids: Sequence[int], before: int = 0) -> int:
    """A number that depends on every id, in order; continues from `before`."""
    return zlib.crc32(array("I", ids).tobytes(), before)


def logprobs_of(ids: Sequence[int], prefix: Sequence[int] = ()) -> list[float]:
    """The logprob of each id after the prefix and the ids before it."""
    state = fingerprint(prefix)
    found = []
    for token in ids:
        state = fingerprint([token], state)
        found.append(-(state % 40_000 + 1) / 10_000)
    return found


def split_tokens(ids: Sequence[int], tokenizer: Tokenizer, rng: Random, share: float) -> list[int]:
    """The same text, with some tokens written as two smaller ones."""
    written: list[int] = []
    for token in ids:
        pieces = _halves(token, tokenizer, rng) if rng.random() < share else None
        written.extend(pieces or [token])
    return written


def _halves(token: int, tokenizer: Tokenizer, rng: Random) -> list[int] | None:
    text = tokenizer.decode([token])
    if len(text) < 2 or not text.isascii() or token in tokenizer.added_tokens_decoder:
        return None
    cut = rng.randint(1, len(text) - 1)
    left, right = (tokenizer.encode(part, add_special_tokens=False) for part in (text[:cut], text[cut:]))
    return left + right if len(left) == len(right) == 1 else None


def write(
    reply: Reply, prompt_ids: Sequence[int], tokenizer: Tokenizer, rng: Random, *, max_tokens: int, split_share: float
) -> Sample:
    """A policy's reply as sampled tokens."""
    ids = split_tokens(tokenizer.encode(reply.text, add_special_tokens=False), tokenizer, rng, split_share)
    finish = "length"
    if reply.ended and tokenizer.eos_token_id is not None:
        ids, finish = [*ids, tokenizer.eos_token_id], "stop"
    if len(ids) > max_tokens:
        ids, finish = ids[:max_tokens], "length"
    spoken = ids[:-1] if finish == "stop" else ids
    return Sample(ids, logprobs_of(ids, prompt_ids), finish, tokenizer.decode(spoken, skip_special_tokens=False))
