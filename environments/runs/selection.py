"""Which rollouts of a run are exported: rules about one rollout, about its group, and about its likeness to others.

A file is read once to choose and once to write. In between only a few numbers per rollout are kept, so a run may be
larger than memory.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import orjson

from agent_loop.model.contract import Message
from agent_loop.records.record import RolloutRecord
from environments.runs.report.html_page import rollouts_with_places
from environments.runs.report.view_model import text_of

Takes = Literal["all", "trainable", "tokens"]
"""What a format has a place for: every rollout, those that may be trained on, or those of them that have tokens."""


@dataclass(frozen=True)
class Rules:
    """What a rollout must be to be chosen. None and empty sets ask for nothing."""

    takes: Takes = "all"
    min_score: float | None = None
    max_score: float | None = None
    outcomes: frozenset[str] = frozenset()
    min_turns: int | None = None
    max_turns: int | None = None
    max_tokens: int | None = None
    uses: frozenset[str] = frozenset()
    avoids: frozenset[str] = frozenset()
    valid_calls: bool = False
    similar: float | None = None
    """A rollout that is at least so similar to one before it is left out."""
    best: int | None = None
    pairs: int | None = None
    gap: float = 0.5

    def refusal(self, record: RolloutRecord) -> str | None:
        """Why a rollout is left out, in a word or two; None when it is chosen."""
        if self.takes != "all":
            if not record.trainable or record.verifier_score is None:
                return "not trainable"
            if record.hack or record.probe:
                return "hack meter"
        if self.takes == "tokens" and not record.has_tokens:
            return "no tokens"
        return self._by_result(record) or self._by_length(record) or self._by_calls(record)

    def _by_result(self, record: RolloutRecord) -> str | None:
        score = record.verifier_score
        if self.outcomes and record.outcome not in self.outcomes:
            return "outcome"
        if self.min_score is not None and (score is None or score < self.min_score):
            return "score"
        return "score" if self.max_score is not None and (score is None or score > self.max_score) else None

    def _by_length(self, record: RolloutRecord) -> str | None:
        turns = len(record.turns)
        if turns < (self.min_turns or 0) or (self.max_turns is not None and turns > self.max_turns):
            return "turns"
        if self.max_tokens is not None:
            tokens = longest(record)
            if tokens is None:
                return "unknown length"
            if tokens > self.max_tokens:
                return "length"
        return None

    def _by_calls(self, record: RolloutRecord) -> str | None:
        called = {str(call.get("name")) for call in record.tool_calls}
        if not self.uses <= called or self.avoids & called:
            return "tools"
        if self.valid_calls and not all(call.get("schema_valid") for call in record.tool_calls):
            return "invalid calls"
        return None


def longest(record: RolloutRecord) -> int | None:
    """Tokens of the longest sequence; by the server's counts where there are no tokens, None where there are none."""
    if record.has_tokens:
        return max((len(segment.tokens) for segment in record.segments), default=0)
    counts = [turn.get(key) for turn in record.turns for key in ("prompt_tokens", "sampled_tokens")]
    known = [int(count) for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return None
    return max(prompt + sampled for prompt, sampled in zip(known[::2], known[1::2], strict=True))


@dataclass
class Chosen:
    """What was chosen of a file: places of lines, in the order of the file, or pairs of places (better, worse)."""

    rollouts: int = 0
    places: list[int] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Why -> how many."""


@dataclass(frozen=True)
class _Candidate:
    place: int
    score: float
    reward: float
    turns: int

    def rank(self) -> tuple[float, float, int, int]:
        """The best first: what the verifier says, then shaping, then the shorter."""
        return (-self.score, -self.reward, self.turns, self.place)


def choose(path: Path, rules: Rules) -> Chosen:
    """Read a file and choose by the rules."""
    chosen = Chosen()
    groups: defaultdict[bytes, list[_Candidate]] = defaultdict(list)
    known = Likeness(rules.similar) if rules.similar is not None else None
    for place, record in rollouts_with_places(path):
        chosen.rollouts += 1
        refusal = rules.refusal(record)
        if refusal is None and known is not None and known.seen(record):
            refusal = "similar"
        if refusal is not None:
            chosen.left_out[refusal] += 1
            continue
        chosen.places.append(place)
        if rules.best or rules.pairs:
            candidate = _Candidate(place, record.verifier_score or 0.0, record.score or 0.0, len(record.turns))
            groups[_same_task(record)].append(candidate)
    if rules.best:
        kept = {own.place for group in groups.values() for own in sorted(group, key=_Candidate.rank)[: rules.best]}
        chosen.left_out["not the best of its group"] += len(chosen.places) - len(kept)
        chosen.places = [place for place in chosen.places if place in kept]
    if rules.pairs:
        chosen.pairs = [pair for group in groups.values() for pair in _pairs(group, rules.pairs, rules.gap)]
    return chosen


def read_at(path: Path, places: Iterable[int]) -> Iterator[RolloutRecord]:
    """The rollouts whose lines begin at these bytes."""
    with path.open("rb") as lines:
        for place in places:
            lines.seek(place)
            yield RolloutRecord.from_json(lines.readline())


def given_messages(record: RolloutRecord) -> list[Message]:
    """The messages before the first that the model sampled."""
    first = next((at for at, call in enumerate(record.sampled_by) if call is not None), None)
    if first is None:
        first = next((at for at, m in enumerate(record.messages) if m.get("role") == "assistant"), len(record.messages))
    return record.messages[:first]


def _same_task(record: RolloutRecord) -> bytes:
    """Equal for rollouts of a group that began alike: a preference says something only about those."""
    return blake2b(orjson.dumps([record.group_id, given_messages(record), record.tools]), digest_size=16).digest()


def _pairs(group: Sequence[_Candidate], most: int, gap: float) -> Iterator[tuple[int, int]]:
    """The best with the worst, the second with the second worst, while they are far enough apart."""
    ranked = sorted(group, key=_Candidate.rank)
    for better, worse in zip(ranked[: min(most, len(ranked) // 2)], reversed(ranked), strict=False):
        if better.score - worse.score < gap:
            return
        yield better.place, worse.place


class Likeness:
    """Finds rollouts that say nearly the same as one before, in time that grows with the number of rollouts only.

    MinHash over runs of five words of what user and assistant said. Signatures whose bands agree anywhere are compared.
    """

    HASHES, ROWS, WORDS = 128, 4, 5
    MOST = 50
    """Rollouts compared per band: a task set whose prompts are alike fills bands with rollouts that are not."""

    def __init__(self, threshold: float) -> None:
        import numpy as np

        random = np.random.default_rng(0)
        self._threshold = threshold
        self._factors = random.integers(1, 2**63, self.HASHES, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        self._bands: defaultdict[tuple[int, bytes], list[bytes]] = defaultdict(list)

    def seen(self, record: RolloutRecord) -> bool:
        """Whether a rollout like this one was there before; it is remembered when not."""
        import numpy as np

        signature = self._signature(record)
        width = 4 * self.ROWS
        keys = [(at, signature[at : at + width]) for at in range(0, len(signature), width)]
        own = np.frombuffer(signature, dtype=np.uint32)
        for other in {found for key in keys for found in self._bands.get(key, ())}:
            if float(np.mean(own == np.frombuffer(other, dtype=np.uint32))) >= self._threshold:
                return True
        for key in keys:
            if len(band := self._bands[key]) < self.MOST:
                band.append(signature)
        return False

    def _signature(self, record: RolloutRecord) -> bytes:
        import numpy as np

        words = list(_said(record))
        runs = {" ".join(words[at : at + self.WORDS]) for at in range(max(1, len(words) - self.WORDS + 1))}
        hashes = np.frombuffer(b"".join(blake2b(run.encode(), digest_size=8).digest() for run in runs), dtype=np.uint64)
        lowest = np.full(self.HASHES, np.iinfo(np.uint64).max, dtype=np.uint64)
        for at in range(0, len(hashes), 4096):  # in parts: a long rollout must not cost 128 times its words at once
            lowest = np.minimum(lowest, np.multiply.outer(hashes[at : at + 4096], self._factors).min(axis=0))
        return bytes((lowest >> np.uint64(32)).astype(np.uint32).tobytes())


def _said(record: RolloutRecord) -> Iterator[str]:
    """Words of the task and of what the model did; system prompt and tool results would make everything alike."""
    for message in record.messages:
        if message.get("role") not in ("user", "assistant"):
            continue
        yield from text_of(message.get("content")).split()
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            yield str(function.get("name"))
            yield from str(function.get("arguments")).split()
