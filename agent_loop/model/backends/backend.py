"""Ids in, ids and logprobs out: the interface every token-exact server is brought to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from agent_loop.model.contract import ModelRefused, Sampling, WeightsSpan
from agent_loop.records.record import covers

GROUP, GROUP_ID = "hermes_group", "hermes_group_id"
"""Keys of a request's body for a server that samples a whole group at once: the group's size, and its name."""
FEWEST_TOKENS = 5
"""Fewer say nothing of an entropy; servers give one or two without being asked."""
ITEM = "hermes_item"
"""Key of a request's body for a stand-in that plays solutions: the item's `id`, and how many turns of the assistant
the prompt began with (`said`)."""


@dataclass(frozen=True)
class Generation:
    """What a server sampled after one prompt."""

    token_ids: list[int]
    """As sampled, the stop token included when the server gives it."""
    logprobs: list[float | None]
    """The sampled token's own logprob under the model, at temperature 1 and before any filter or penalty, however it
    was sampled; None where the server gave none."""
    finish_reason: str
    """The server's reason in OpenAI's words: stop, length, abort, ..."""
    weights_version: str | None = None
    """Which weights sampled it, when the server says so; those of the first token when they changed on the way."""
    weights_spans: tuple[WeightsSpan, ...] = ()
    """Which weights sampled which tokens, from servers that say it so exactly."""
    entropies: list[float | None] = field(default_factory=list)
    """Of the model's distribution at each token, where the server was asked for its likeliest tokens; else empty."""


def entropies(rows: Iterable[Iterable[float]]) -> list[float | None]:
    """From the logprobs of the likeliest tokens at each place, in nats; what is left over counts as one token more.

    So each is at most the true one, and the more tokens are asked for, the nearer.
    """
    found = [_entropy(list(row)) for row in rows]
    return found if any(value is not None for value in found) else []


def _entropy(logprobs: list[float]) -> float | None:
    if len(logprobs) < FEWEST_TOKENS:
        return None
    left = 1.0 - sum(map(math.exp, logprobs))
    return -sum(math.exp(p) * p for p in logprobs) - (left * math.log(left) if left > 0 else 0.0)


def weights_spans(rows: Any, tokens: int) -> tuple[WeightsSpan, ...]:
    """`[{"version", "start", "end"}]`, as vLLM and SGLang send it; raises ModelRefused when it is not all tokens."""
    try:
        spans = tuple(WeightsSpan(str(row["version"]), row["start"], row["end"]) for row in rows or ())
    except (KeyError, TypeError) as error:
        raise ModelRefused(f"the server's weight_versions cannot be read: {str(rows)[:200]}") from error
    if not spans or tokens == 0:
        return ()
    if not covers(spans, tokens):
        raise ModelRefused(f"the server's weight_versions are not those of {tokens} tokens: {str(rows)[:200]}")
    return spans


class TokenBackend(Protocol):
    """A server that can be trained against."""

    async def generate(self, prompt_ids: list[int], sampling: Sampling, *, stop_ids: Sequence[int] = ()) -> Generation:
        """Sample one continuation. Raises the errors of `agent_loop.model.contract`; never retries by itself.

        `prompt_ids` is the caller's own list, which may be long: it is neither changed nor kept.
        """

    async def context_tokens(self) -> int | None:
        """Tokens that prompt and answer may have together; None when the server does not tell."""

    async def close(self) -> None:
        """Drop the connections."""


@runtime_checkable
class Scorer(Protocol):
    """A backend that can also say what it thinks of given tokens; `verify --against` asks it."""

    async def score(self, ids: Sequence[int], positions: Sequence[int]) -> list[float]:
        """For each position p: the logprob of ids[p] after ids[:p]."""
