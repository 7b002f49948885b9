"""The token ledger of one rollout: what was sent and sampled, in order, each sampled token trained exactly once.

Append-only inside a segment; `begin` opens the next one. A logprob that the server did not give is None, its token
stays in the prompt (-100 / 1.0): an unknown logprob is never guessed and never shifted onto a neighbour.

`Vocabulary` says what each id stands for, so that a stored rollout can be read without its tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from agent_loop.model.contract import Segment, WeightsSpan
from agent_loop.model.tokens.template import Tokenizer, decode_ids
from agent_loop.records.record import Piece, SampledCall

MASKED = -100
NO_LOGPROB = 1.0
"""Stands where there is no logprob: at prompt positions, and at sampled tokens that came without one."""


class LedgerError(RuntimeError):
    """The ledger and the wire disagree: a bug in this package, never a property of the model."""


@dataclass(frozen=True)
class _Call:
    """One request: where its prompt and its answer end in their segment."""

    segment: int
    prompt_len: int
    sampled_len: int
    finish_reason: str
    duration_s: float
    weights_version: str | None
    weights_spans: tuple[WeightsSpan, ...]
    temperature: float | None
    entropies: list[float | None]


@dataclass
class Ledger:
    """Segments under construction and the calls that filled them."""

    _segments: list[Segment] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Ids of the open segment: the next prompt. Not a copy; callers must not change it."""
        return self._segments[-1].tokens

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Open a segment with this prompt."""
        self._segments.append(Segment([], [], []))
        self.extend(prompt_ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Add ids that the model did not sample."""
        segment = self._segments[-1]
        segment.tokens.extend(ids)
        segment.masks.extend([MASKED] * len(ids))
        segment.logprobs.extend([NO_LOGPROB] * len(ids))

    def sampled(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        *,
        sent: Sequence[int],
        finish_reason: str,
        duration_s: float = 0.0,
        weights_version: str | None = None,
        weights_spans: tuple[WeightsSpan, ...] = (),
        temperature: float | None = None,
        entropies: Sequence[float | None] = (),
    ) -> None:
        """Add what the model sampled on top of everything in the open segment, which must be what was `sent`."""
        if len(ids) != len(logprobs):
            raise LedgerError(f"{len(ids)} sampled tokens with {len(logprobs)} logprobs")
        if entropies and len(ids) != len(entropies):
            raise LedgerError(f"{len(ids)} sampled tokens with {len(entropies)} entropies")
        segment = self._segments[-1]
        if sent != segment.tokens:
            raise LedgerError("the prompt in the ledger is not the prompt that was sent")
        call = _Call(
            segment=len(self._segments) - 1,
            prompt_len=len(segment.tokens),
            sampled_len=len(ids),
            finish_reason=finish_reason,
            duration_s=duration_s,
            weights_version=weights_version,
            weights_spans=weights_spans,
            temperature=temperature,
            entropies=list(entropies),
        )
        self._calls.append(call)
        segment.tokens.extend(ids)
        segment.masks.extend(MASKED if p is None else i for i, p in zip(ids, logprobs, strict=True))
        segment.logprobs.extend(NO_LOGPROB if p is None else p for p in logprobs)

    def segments(self) -> list[Segment]:
        """Copies for the trainer: each ends with its last sampled token, those without any are left out."""
        ends: dict[int, int] = {}
        for call in self._calls:
            ends[call.segment] = call.prompt_len + call.sampled_len
        done = [(self._segments[index], end) for index, end in sorted(ends.items())]
        return [Segment(s.tokens[:end], s.masks[:end], s.logprobs[:end]) for s, end in done]

    def finish_reasons(self) -> list[str]:
        """The finish reason of the last call of each segment that `segments` gives."""
        return list({call.segment: call.finish_reason for call in self._calls}.values())

    def sampled_calls(self) -> list[SampledCall]:
        """The calls with their whole prompts, each checked when it was sent; a segment only grows."""
        position = {index: k for k, index in enumerate(sorted({c.segment for c in self._calls}))}
        return [self._stored(call, position[call.segment]) for call in self._calls]

    def _stored(self, call: _Call, position: int) -> SampledCall:
        segment = self._segments[call.segment]
        end = call.prompt_len + call.sampled_len
        prompt = segment.tokens[: call.prompt_len]
        return SampledCall(
            segment=position,
            prompt_ids=prompt,
            sampled_ids=segment.tokens[call.prompt_len : end],
            logprobs=segment.logprobs[call.prompt_len : end],
            finish_reason=call.finish_reason,
            duration_s=call.duration_s,
            weights_version=call.weights_version,
            weights_spans=list(call.weights_spans),
            temperature=call.temperature,
            entropies=call.entropies,
        )


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
