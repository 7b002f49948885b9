"""Keeps the prompt within `max_context_tokens` while the full trajectory lives on elsewhere.

The window follows the conversation append-only: a turn costs what the turn added, whatever came before. When the prompt
outgrows the limit, strategies shorten it down to a low-water mark and the conversation restarts from that view, so that
the following turns extend the same prefix. The same messages and the same counts always give the same view.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_loop.context.strategies import (
    Goal,
    Strategy,
    View,
    build_view,
    default_strategies,
    estimate,
    estimate_tools,
    head_length,
)
from agent_loop.model.contract import Conversation, Message, ModelServer, ModelTurn, ToolSchema

MAX_ROUNDS = 4
"""Rounds of shortening and counting again; the estimate is corrected by each count."""


class ContextOverflow(Exception):
    """What must stay in the prompt does not fit."""


@dataclass(frozen=True)
class ContextPolicy:
    """How much fits, and how to make it fit."""

    max_tokens: int | None = None
    """None: never truncate."""
    low_water: float = 0.7
    """Share of `max_tokens` that a truncation goes down to."""
    keep_recent: int = 6
    """Messages at the end that are protected, rounded up to whole units."""
    strategies: tuple[Strategy, ...] = ()
    """In this order; empty means the default ones."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError("max_context_tokens must be positive")
        if not 0 < self.low_water <= 1:
            raise ValueError("low_water must be in (0, 1]")


class ContextWindow:
    """The prompt of one rollout, as its conversation has it."""

    def __init__(
        self,
        policy: ContextPolicy,
        server: ModelServer,
        conversation: Conversation,
        tools: Sequence[ToolSchema],
        messages: Sequence[Message],
    ) -> None:
        self._policy = policy
        self._server = server
        self._conversation = conversation
        self._tools = list(tools)
        self._messages = list(messages)
        self._opening = len(self._messages)
        self._tokens = 0
        # A conversation that knows its length needs no second count.
        self._counting = policy.max_tokens is not None and conversation.prompt_tokens() is None
        if self._counting:
            counted = server.count_tokens(self._messages, self._tools)
            estimated = estimate_tools(self._tools) + sum(map(estimate, self._messages)) if counted is None else 0
            self._tokens = estimated if counted is None else counted

    def append(self, messages: Sequence[Message]) -> None:
        """Follow messages that were appended to the conversation, and count only them."""
        self._messages.extend(messages)
        if self._counting and messages:
            counted = self._server.count_tokens(messages, ())
            self._tokens += sum(map(estimate, messages)) if counted is None else counted

    def sampled(self, turn: ModelTurn, message: Message) -> None:
        """Follow a sampled turn; the server's own counts, where it gives them, replace the estimate so far."""
        self._messages.append(message)
        if not self._counting:
            return
        if turn.prompt_tokens is not None:
            self._tokens = turn.prompt_tokens
        self._tokens += turn.sampled_tokens if turn.sampled_tokens is not None else estimate(message)

    def size(self) -> int:
        """Tokens of the next prompt: exact when the conversation knows, else followed."""
        exact = self._conversation.prompt_tokens()
        return self._tokens if exact is None else exact

    async def fit(self) -> dict[str, Any] | None:
        """Truncate if needed; what was done, or None. Raises `ContextOverflow` when nothing more can be done."""
        limit = self._policy.max_tokens
        if limit is None or (size := self.size()) <= limit:
            return None
        return await self._truncate(size, limit)

    async def shrink(self) -> dict[str, Any]:
        """The server refused the prompt as too long although it was thought to fit: go well below its size."""
        if self._policy.max_tokens is None:
            raise ContextOverflow("the server refused the prompt as too long, and max_context_tokens is not set")
        size = self.size()
        return await self._truncate(size, min(self._policy.max_tokens, size * 3 // 4))

    async def _truncate(self, size: int, limit: int) -> dict[str, Any]:
        strategies = self._policy.strategies or default_strategies()
        goal = Goal(limit, int(limit * self._policy.low_water))
        head = head_length(self._messages[: self._opening])
        before = build_view(self._messages, head, self._policy.keep_recent, estimate_tools(self._tools))
        view = before = replace(before, scale=size / max(before.tokens(), 1))
        tokens = size
        for _ in range(MAX_ROUNDS):
            for strategy in strategies:
                view = await strategy.apply(view, goal)
            messages = view.messages()
            counted = self._server.count_tokens(messages, self._tools)
            tokens = view.tokens() if counted is None else counted
            if tokens <= limit:
                self._messages, self._tokens = messages, tokens
                self._conversation.restart(messages)
                return _report(before, view, size, tokens)
            # The estimate was too low: correct it and cut again.
            view = replace(view, scale=view.scale * tokens / max(view.tokens(), 1))
        raise ContextOverflow(f"the prompt still needs {tokens} tokens after truncation; {limit} are allowed")


def _report(before: View, after: View, tokens_before: int, tokens_after: int) -> dict[str, Any]:
    """What a truncation did, as `RolloutRecord.truncations` keeps it."""
    dropped = before.units[: len(before.units) - len(after.units)]
    kept = zip(before.units[len(dropped) :], after.units, strict=True)
    pairs = (pair for old, new in kept for pair in zip(old.messages, new.messages, strict=True))
    return {
        "tokens_before": tokens_before,
        "tokens_after": tokens_after,
        "dropped_messages": sum(len(unit.messages) for unit in dropped),
        "shortened_results": sum(old is not new for old, new in pairs),
    }
