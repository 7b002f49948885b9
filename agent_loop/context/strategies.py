"""Ways to make a prompt shorter. Each takes a view and a goal and returns a view; the same input gives the same view.

The default order: shorten old tool results, drop the oldest units, and when the protected part alone is too long,
shorten recent tool results too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from agent_loop.context.result_budget import MIN_CHARS, shorten
from agent_loop.model.contract import Message, ToolSchema

CHARS_PER_TOKEN = 4
MESSAGE_TOKENS = 10
"""Role markers and the like around each message."""
PART_TOKENS = 1000
"""An image or other part that is not text."""


@dataclass(frozen=True)
class Unit:
    """Messages that are kept or dropped together."""

    messages: tuple[Message, ...]
    tokens: int


@dataclass(frozen=True)
class View:
    """A prompt: head, units (oldest first), of which the last `recent` are protected."""

    head: tuple[Message, ...]
    units: tuple[Unit, ...]
    recent: int
    fixed_tokens: int
    """Estimated tokens of the head and the tool schemas."""
    scale: float = 1.0
    """Measured tokens per estimated token."""

    @property
    def old(self) -> tuple[Unit, ...]:
        """The unprotected units."""
        return self.units[: len(self.units) - self.recent]

    def tokens(self) -> int:
        """Estimated tokens of the whole prompt."""
        return round((self.fixed_tokens + sum(unit.tokens for unit in self.units)) * self.scale)

    def scaled(self, tokens: int) -> int:
        """What an estimate is worth in measured tokens."""
        return round(tokens * self.scale)

    def messages(self) -> list[Message]:
        return [*self.head, *(message for unit in self.units for message in unit.messages)]

    def with_units(self, units: Sequence[Unit]) -> View:
        """The same view with other units; `recent` is kept."""
        return replace(self, units=tuple(units))


def build_view(messages: Sequence[Message], head: int, keep_recent: int, tools_tokens: int) -> View:
    """Split messages into a head of so many messages and units; protect units of the last `keep_recent` messages."""
    units: list[Unit] = []
    for message in messages[head:]:
        if message.get("role") == "tool" and units:
            last = units[-1]
            units[-1] = Unit((*last.messages, message), last.tokens + estimate(message))
        else:
            units.append(Unit((message,), estimate(message)))
    recent, covered = 0, 0
    while recent < len(units) and covered < keep_recent:
        recent += 1
        covered += len(units[-recent].messages)
    fixed = tools_tokens + sum(map(estimate, messages[:head]))
    return View(tuple(messages[:head]), tuple(units), recent, fixed)


def head_length(messages: Sequence[Message]) -> int:
    """Messages up to and including the first user message; leading system messages only, if there is no user."""
    for index, message in enumerate(messages):
        if message.get("role") == "user":
            return index + 1
        if message.get("role") not in ("system", "developer"):
            return index
    return len(messages)


def estimate(message: Message) -> int:
    """Tokens of a message by its characters: content in every form, reasoning, calls."""
    chars = len(message.get("reasoning_content") or "")
    extra = MESSAGE_TOKENS
    content = message.get("content")
    if isinstance(content, str):
        chars += len(content)
    elif isinstance(content, list):
        texts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        chars += sum(len(text) for text in texts if isinstance(text, str))
        extra += PART_TOKENS * sum(not isinstance(text, str) for text in texts)
    for call in message.get("tool_calls") or ():
        function: Any = call.get("function") or {}
        chars += len(str(function.get("name"))) + len(str(function.get("arguments")))
        extra += MESSAGE_TOKENS
    return -(-chars // CHARS_PER_TOKEN) + extra


def estimate_tools(tools: Sequence[ToolSchema]) -> int:
    """Tokens of the tool schemas by their characters."""
    return -(-len(json.dumps(list(tools))) // CHARS_PER_TOKEN) if tools else 0


@dataclass(frozen=True)
class Goal:
    """Tokens that the prompt must fit, and the lower mark it goes down to once it is cut at all."""

    limit: int
    low_water: int


class Strategy(Protocol):
    async def apply(self, view: View, goal: Goal) -> View:
        """The view, shortened towards `goal.low_water` as far as this strategy can."""


@dataclass(frozen=True)
class ShortenOldResults:
    """Old tool results keep head and tail, oldest first."""

    keep_chars: int = 600

    async def apply(self, view: View, goal: Goal) -> View:
        """Shorten results of unprotected units until the low-water mark is reached."""
        return _shorten_units(view, range(len(view.old)), self.keep_chars, goal.low_water)


@dataclass(frozen=True)
class DropOldest:
    """The oldest unprotected units go, each whole."""

    async def apply(self, view: View, goal: Goal) -> View:
        """Drop units until the low-water mark is reached or only protected ones are left."""
        excess = view.tokens() - goal.low_water
        dropped = 0
        for unit in view.old:
            if excess <= 0:
                break
            excess -= view.scaled(unit.tokens)
            dropped += 1
        return view.with_units(view.units[dropped:])


@dataclass(frozen=True)
class ShortenRecent:
    """When what is protected is too long by itself, its tool results shrink too, in steps.

    The newest unit is what the model is about to read: it shrinks only when the prompt would not fit otherwise.
    """

    steps_chars: tuple[int, ...] = (8_000, 2_000, MIN_CHARS)

    async def apply(self, view: View, goal: Goal) -> View:
        """Shorten protected results, gently first."""
        newest = max(len(view.units) - 1, 0)
        for keep_chars in self.steps_chars:
            view = _shorten_units(view, range(newest), keep_chars, goal.low_water)
        for keep_chars in self.steps_chars:
            if view.tokens() > goal.limit:
                view = _shorten_units(view, range(newest, len(view.units)), keep_chars, goal.low_water)
        return view


def default_strategies() -> tuple[Strategy, ...]:
    """Shorten, drop, shorten the protected part."""
    return (ShortenOldResults(), DropOldest(), ShortenRecent())


def _shorten_units(view: View, which: range, keep_chars: int, target: int) -> View:
    units = list(view.units)
    excess = view.tokens() - target
    for index in which:
        if excess <= 0:
            break
        before = units[index]
        units[index] = _shortened(before, keep_chars)
        excess -= view.scaled(before.tokens - units[index].tokens)
    return view.with_units(units)


def _shortened(unit: Unit, keep_chars: int) -> Unit:
    messages = tuple(_shorten_result(message, keep_chars) for message in unit.messages)
    if all(new is old for new, old in zip(messages, unit.messages, strict=True)):
        return unit
    return Unit(messages, sum(map(estimate, messages)))


def _shorten_result(message: Message, keep_chars: int) -> Message:
    content = message.get("content")
    if message.get("role") != "tool" or not isinstance(content, str) or len(content) <= max(keep_chars, MIN_CHARS):
        return message
    return {**message, "content": shorten(content, keep_chars)}
