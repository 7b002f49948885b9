"""The prompt as truncation sees it: a protected head, then units that stand or fall together.

A unit is an assistant message with the tool messages that answer it, or one other message; so no strategy can orphan
a tool message. Sizes are estimates (characters / 4) times a factor measured on the whole prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agent_loop.model import Message, ToolSchema

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
    summary: str | None = None
    """Stands, appended to the head, for units that were dropped."""

    @property
    def old(self) -> tuple[Unit, ...]:
        """The unprotected units."""
        return self.units[: len(self.units) - self.recent]

    def tokens(self) -> int:
        """Estimated tokens of the whole prompt."""
        summary = len(self.summary or "") / CHARS_PER_TOKEN
        return round((self.fixed_tokens + summary + sum(unit.tokens for unit in self.units)) * self.scale)

    def scaled(self, tokens: int) -> int:
        """What an estimate is worth in measured tokens."""
        return round(tokens * self.scale)

    def messages(self) -> list[Message]:
        """The prompt as messages."""
        head = with_summary(self.head, self.summary) if self.summary else list(self.head)
        return head + [message for unit in self.units for message in unit.messages]

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


def with_summary(head: Sequence[Message], summary: str) -> list[Message]:
    """The head with a summary at its end: inside the last user message, so that roles still alternate."""
    text = f"[Summary of earlier work, which is no longer shown]\n{summary}"
    if not head or head[-1].get("role") != "user":
        return [*head, {"role": "user", "content": text}]
    last = dict(head[-1])
    content = last.get("content")
    if isinstance(content, list):
        last["content"] = [*content, {"type": "text", "text": text}]
    else:
        last["content"] = f"{content or ''}\n\n{text}"
    return [*head[:-1], last]


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
