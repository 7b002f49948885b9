"""Are the tokens that a trainer is given those that were sampled? Its own logprobs say so, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, Protocol, runtime_checkable

from agent_loop.model.backends.backend import TokenBackend
from environments.rollouts.samples import Sample

RATIO_BOUND, KL_BOUND = 1e-3, 1e-3
CLEARLY = 0.5
"""A difference of logprobs that no rounding explains: 0.011 was the largest between torch and llama.cpp on F16."""
Control = Literal["swapped", "shifted", "wrong"]


class TrainerView(Protocol):
    """A trainer as the judge of samples."""

    def measure(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """The mean ratio of its probabilities to ours, and the KL it computes from them, over all trained tokens."""

    def logprobs(self, sample: Sample) -> list[float]:
        """What its weights say of each token of a sample, at temperature 1; the first is 0.0."""


@runtime_checkable
class SamplesItself(TrainerView, Protocol):
    """A trainer that has a sampler of its own: the samples are to come from it."""

    backend: TokenBackend
    tokenizer: Any


@dataclass(frozen=True)
class Exactness:
    """What a trainer made of our samples."""

    tokens: int
    ratio: float
    kl: float
    off: str = ""
    """Where the largest difference is, and what it looks like; empty when the tokens are exact."""

    @property
    def exact(self) -> bool:
        return abs(self.ratio - 1) <= RATIO_BOUND and self.kl <= KL_BOUND

    def sentence(self) -> str:
        """For the user."""
        figures = f"ratio {self.ratio:.4f} ± {abs(self.ratio - 1):.1g}, kl {self.kl:.1g} over {self.tokens} tokens"
        return f"{figures}: your tokens are exact" if self.exact else f"{figures}: NOT exact; {self.off}"


def judge(view: TrainerView, samples: Sequence[Sample]) -> Exactness:
    """Ask a trainer; where it disagrees, find the position."""
    ratio, kl = view.measure(samples)
    found = Exactness(sum(sum(sample.mask) for sample in samples), ratio, kl)
    return found if found.exact else replace(found, off=_largest(view, samples))


def _largest(view: TrainerView, samples: Sequence[Sample]) -> str:
    worst, place = -1.0, ""
    for sample in samples:
        theirs = view.logprobs(sample)
        differences = [abs(a - b) if m else 0.0 for a, b, m in zip(theirs, sample.logprobs, sample.mask, strict=True)]
        position = max(range(len(differences)), key=differences.__getitem__)
        if differences[position] > worst:
            worst = differences[position]
            place = (
                f"the largest difference is {worst:.3f} at position {position} (token {sample.tokens[position]}) of "
                f"{sample.rollout_id}, segment {sample.segment}: {_reason(sample, theirs, differences)}"
            )
    return place


def _reason(sample: Sample, theirs: Sequence[float], differences: Sequence[float]) -> str:
    trained = [place for place, mask in enumerate(sample.mask) if mask]
    for shift, where in ((1, "too late"), (-1, "too early")):
        moved = [place for place in trained if 0 <= place - shift < len(theirs)]
        if moved and math.fsum(abs(theirs[p - shift] - sample.logprobs[p]) for p in moved) / len(moved) < 0.05:
            return f"masks and logprobs are one token {where}"
    far = [place for place in trained if differences[place] > CLEARLY]
    if 0 < len(far) <= max(1, len(trained) // 10):
        return "a token or its logprob is wrong there, and the rest fits"
    if far and far[0] > trained[0]:
        return f"all fits before position {far[0]}: a token there or shortly before is not the one that was sampled"
    return "most positions differ: do server and trainer have the same weights and the same chat template?"


def corrupted(samples: Sequence[Sample], control: Control) -> list[Sample]:
    """Negative controls: what must not pass for exact."""
    random = Random(0)
    change: dict[str, Callable[[Sample], Sample]] = {
        "swapped": lambda sample: _swapped(sample, random),
        "shifted": lambda sample: replace(sample, mask=[0, *sample.mask[:-1]], logprobs=[0.0, *sample.logprobs[:-1]]),
        "wrong": lambda sample: replace(sample, logprobs=_one_wrong(sample, random)),
    }
    return [change[control](sample) for sample in samples]


def _trained(sample: Sample) -> list[int]:
    return [place for place, mask in enumerate(sample.mask) if mask]


def _swapped(sample: Sample, random: Random) -> Sample:
    """Two neighbouring sampled tokens that differ, the other way round."""
    tokens = list(sample.tokens)
    pairs = [p for p in _trained(sample)[:-1] if sample.mask[p + 1] and tokens[p] != tokens[p + 1]]
    place = random.choice(pairs)
    tokens[place], tokens[place + 1] = tokens[place + 1], tokens[place]
    return replace(sample, tokens=tokens)


def _one_wrong(sample: Sample, random: Random) -> list[float]:
    logprobs = list(sample.logprobs)
    place = random.choice(_trained(sample))
    logprobs[place] -= 1.0
    return logprobs
