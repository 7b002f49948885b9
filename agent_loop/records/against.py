"""Asks the live model again: given the stored prefix, does it give the stored token the stored logprob?

This finds what no check of the stored numbers can: a doubled token, a missing one or a shifted logprob changes what the
model says about everything after it. Servers compute a prompt and a sampled token in slightly different ways, so the
answers differ a little; how much is measured on the same server, by sampling a little and asking again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from agent_loop.model.backends.backend import Scorer, TokenBackend
from agent_loop.model.contract import ModelRefused, Sampling
from agent_loop.model.tokens.ledger import MASKED
from agent_loop.records.record import RolloutRecord, SampledCall

TIGHT = 0.02
"""Largest difference on unquantized weights with attention in 32 bits (F16 differed by at most 0.009)."""
FLOOR_PROMPTS = 6
FLOOR_TOKENS = 24
CONCURRENT = 4


@dataclass(frozen=True)
class Place:
    """One sampled token of a stored rollout."""

    rollout_id: str
    line: int
    segment: int
    position: int
    logprob: float


@dataclass(frozen=True)
class Difference:
    """What the model says now, and what was stored."""

    place: Place
    again: float

    @property
    def size(self) -> float:
        return abs(self.again - self.place.logprob)


@dataclass(frozen=True)
class Tolerance:
    """What counts as the same logprob; `said` tells where the figures come from."""

    largest: float
    mean: float
    said: str


@dataclass(frozen=True)
class Confirmation:
    """What the model says about a file."""

    differences: tuple[Difference, ...]
    tolerance: Tolerance

    @property
    def largest(self) -> Difference | None:
        return max(self.differences, key=lambda d: d.size, default=None)

    @property
    def mean(self) -> float:
        return sum(d.size for d in self.differences) / len(self.differences) if self.differences else 0.0

    @property
    def violation(self) -> str | None:
        """What is beyond the tolerance, in one sentence."""
        worst = self.largest
        if worst is None:
            return None
        if not worst.size <= self.tolerance.largest:
            p = worst.place
            return (
                f"line {p.line} (rollout {p.rollout_id}): segment {p.segment}, position {p.position}: stored logprob "
                f"{p.logprob:.4f}, the model says {worst.again:.4f}; tolerance {self.tolerance.largest:.4f}"
            )
        if not self.mean <= self.tolerance.mean:
            places = len(self.differences)
            return f"mean difference {self.mean:.4f} is beyond {self.tolerance.mean:.4f} over {places} places"
        return None


def choose_places(records: Sequence[tuple[int, RolloutRecord]], count: int, seed: int) -> list[Place]:
    """Random sampled positions over all rollouts; all of them when there are fewer."""
    places = [
        Place(record.rollout_id, line, index, position, segment.logprobs[position])
        for line, record in records
        for index, segment in enumerate(record.segments)
        for position, mask in enumerate(segment.masks)
        if mask != MASKED and position > 0
    ]
    return places if len(places) <= count else Random(seed).sample(places, count)


async def confirm(
    records: Sequence[tuple[int, RolloutRecord]],
    backend: TokenBackend,
    *,
    positions: int = 300,
    tolerance: float | None = None,
    seed: int = 0,
) -> Confirmation:
    """Ask the model again at random places; without a tolerance the noise floor of this server sets it."""
    if not isinstance(backend, Scorer):
        raise ModelRefused("this kind of server cannot give logprobs of given tokens")
    if tolerance is None:
        calls = [c for _, record in records for c in record.sampled_calls[:1]]
        allowed = await measure_floor(backend, Random(seed).sample(calls, min(FLOOR_PROMPTS, len(calls))))
    else:
        allowed = Tolerance(tolerance, tolerance, "given")
    places = choose_places(records, positions, seed)
    return Confirmation(tuple(await _ask_again(records, backend, places)), allowed)


async def _ask_again(
    records: Sequence[tuple[int, RolloutRecord]], scorer: Scorer, places: Sequence[Place]
) -> list[Difference]:
    """One question per segment, a few at a time."""
    by_line = dict(records)
    groups: dict[tuple[int, int], list[Place]] = {}
    for place in places:
        groups.setdefault((place.line, place.segment), []).append(place)
    at_once = asyncio.Semaphore(CONCURRENT)

    async def ask(line: int, segment: int, wanted: list[Place]) -> list[Difference]:
        async with at_once:
            tokens = by_line[line].segments[segment].tokens
            scores = await scorer.score(tokens, [p.position for p in wanted])
            return [Difference(p, score) for p, score in zip(wanted, scores, strict=True)]

    asked = await asyncio.gather(*(ask(line, segment, wanted) for (line, segment), wanted in groups.items()))
    return [difference for group in asked for difference in group]


async def measure_floor(backend: TokenBackend, calls: Sequence[SampledCall]) -> Tolerance:
    """Sample a little as each of these calls did and ask again about what was sampled: what differs is noise.

    At the same temperature, because servers differ more on tokens that are unlikely.
    """
    if not isinstance(backend, Scorer):
        raise ModelRefused("this kind of server cannot give logprobs of given tokens")
    sizes: list[float] = []
    for call in calls:
        prompt = call.prompt_ids
        temperature = 1.0 if call.temperature is None else call.temperature
        generation = await backend.generate(prompt, Sampling(temperature=temperature, max_tokens=FLOOR_TOKENS))
        known = [(k, p) for k, p in enumerate(generation.logprobs) if p is not None]
        again = await backend.score([*prompt, *generation.token_ids], [len(prompt) + k for k, _ in known])
        sizes += [abs(a - p) for a, (_, p) in zip(again, known, strict=True)]
    if not sizes:
        return Tolerance(TIGHT, TIGHT, "no prompt to measure a noise floor with")
    top, mean = max(sizes), sum(sizes) / len(sizes)
    said = f"noise floor of this server over {len(sizes)} tokens: mean {mean:.4f}, largest {top:.4f}"
    return Tolerance(max(TIGHT, 2.0 * top), max(TIGHT / 4, 2.5 * mean), said)
