"""Ids in, ids and logprobs out: the interface every token-exact server is brought to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from agent_loop.model.contract import ModelRefused, Sampling, WeightsSpan
from agent_loop.records.record import covers

GROUP, GROUP_ID = "hermes_group", "hermes_group_id"
"""Keys of a request's body for a server that samples a whole group at once: the group's size, and its name."""
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


def weights_spans(rows: Any, tokens: int) -> tuple[WeightsSpan, ...]:
    """`[{"version", "start", "end"}]`, as vLLM and SGLang send it; raises ModelRefused when it is not all tokens.

    Weights that were never given a version (null) are of none."""
    try:
        spans = tuple(WeightsSpan(str(row["version"]), row["start"], row["end"]) for row in rows or ())
        unnamed = any(row["version"] is None for row in rows or ())
    except (KeyError, TypeError) as error:
        raise ModelRefused(f"the server's weight_versions cannot be read: {str(rows)[:200]}") from error
    if not spans or tokens == 0 or unnamed:
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
