"""What a parse gives: text, reasoning, calls and faults, each with its place in the input.

A call whose name could be read is in `Parsed.calls` even when its arguments could not (then `error` says why); a
malformed call without a readable name is in `Parsed.errors`. Text without any call has neither.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]
    raw: str
    """The text of this call as the model wrote it; `span` is its place in the input."""
    span: tuple[int, int]
    complete: bool = True
    """False when the text ended, or the next call began, before the call's closing marker."""
    declared: bool | None = None
    """Whether the name is among the tools given; None when no tools were given."""
    repaired: tuple[str, ...] = ()
    """Classes of repair the arguments needed, in order of first use."""
    error: str | None = None
    """None, or one sentence the model could act on; then `arguments` is empty and the call must not run."""

    @property
    def ok(self) -> bool:
        """Whether the call can run."""
        return self.error is None


@dataclass(frozen=True)
class Malformed:
    """A place where a call began but not even a name could be read."""

    message: str
    raw: str
    span: tuple[int, int]


@dataclass(frozen=True)
class Parsed:
    """One assistant turn, taken apart."""

    content: str = ""
    """Text before the first call (formats that mix text and calls join all of it here)."""
    trailing: str = ""
    """Text after the first call."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[Malformed, ...] = field(default=())

    @property
    def good_calls(self) -> tuple[ToolCall, ...]:
        """The calls that can run."""
        return tuple(call for call in self.calls if call.ok)
