"""Ways to make a prompt shorter. Each takes a view and a goal and returns a view, as deterministic as what it is given.

The default order: shorten old tool results, drop the oldest units, and when the protected part alone is too long,
shorten recent tool results too. `SummarizeOldest` goes before `DropOldest` where a summary is worth a model call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from agent_loop import prompts
from agent_loop.context_view import Unit, View, estimate
from agent_loop.model import Message, ModelError, ModelServer, Sampling
from agent_loop.shorten import MIN_CHARS, shorten

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Goal:
    """Tokens that the prompt must fit, and the lower mark it goes down to once it is cut at all."""

    limit: int
    low_water: int


class Strategy(Protocol):
    """One way to shorten a view."""

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


@dataclass(frozen=True)
class SummarizeOldest:
    """The oldest unprotected units are replaced by a summary that the model writes.

    The summary is sampled in a conversation of its own and is not part of the training data. When the model cannot
    be asked, the view is left to the strategies that follow.
    """

    server: ModelServer
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=0.0, max_tokens=800))

    async def apply(self, view: View, goal: Goal) -> View:
        """Summarize all unprotected units when the view is above the low-water mark."""
        if view.tokens() <= goal.low_water or not view.old:
            return view
        text = prompts.load("summarize").format(summary=view.summary or "(none)", transcript=_transcript(view.old))
        try:
            turn = await self.server.open([{"role": "user", "content": text}], []).sample(self.sampling)
        except ModelError as error:
            log.warning("no summary of earlier turns: %s", error)
            return view
        if not turn.content.strip():
            return view
        return replace(view, units=view.units[len(view.old) :], summary=turn.content.strip())


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


def _transcript(units: Sequence[Unit]) -> str:
    lines: list[str] = []
    for unit in units:
        for message in unit.messages:
            lines.append(f"[{message.get('role')}] {message.get('content') or ''}".rstrip())
            for call in message.get("tool_calls") or ():
                lines.append(f"  -> {call['function']['name']} {call['function']['arguments']}")
    return "\n".join(lines)
