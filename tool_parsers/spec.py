"""The vocabulary of a format: what a spec says, and what a reader is given and gives back.

A format is a frozen `Format`: its reasoning markers, the markers that are structure and never content, and one of the
readers of `tool_parsers.readers`, which are themselves small frozen specs. Adding a format is writing one of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tool_parsers.schema import Tools, sole_parameter
from tool_parsers.text import Text


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


MAX_NAME = 256
"""Longer names are not names: a bound on every header search."""

MAX_FAULTS = 500
"""More broken calls than this in one text are a model caught in a loop: the rest is text."""
MAX_MISSES = 5000
MAX_LOOKAHEADS = 2000

Start = Literal["content", "reasoning", "header"]
Trim = Literal["verbatim", "newlines", "strip"]


@dataclass(frozen=True)
class Reasoning:
    """Markers of a thinking block."""

    openers: tuple[str, ...] = ("<think>",)
    closers: tuple[str, ...] = ("</think>",)
    implicit_end: bool = False
    """Whether a call inside an unclosed block ends it and counts, whatever follows."""
    orphan_closer: bool = True
    """Whether a closer without opener means that the prompt had opened the block."""
    transparent: bool = False
    """Whether calls inside closed thinking count too."""
    skipped_by: tuple[str, ...] = ()
    """Markers that, as the first thing in the text, say that the thinking the prompt opened stays empty."""


THINK = Reasoning()
THINK_IMPLICIT = Reasoning(implicit_end=True)


@dataclass
class Reading:
    """What a reader found from an opener on, and where it stopped."""

    end: int
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[Malformed] = field(default_factory=list)


@dataclass(frozen=True)
class Segment:
    """A stretch of a message-structured format: text, thinking, or a place where calls may stand."""

    kind: Literal["content", "reasoning", "calls", "call"]
    start: int
    end: int
    name: str = ""
    """For `call`: the tool the header names; the stretch is then its JSON arguments."""
    opened: int = 0
    """Where the segment's header begins."""
    closed: bool = True


class Reader(Protocol):
    """Finds and reads the calls of one grammar."""

    def find(self, scan: Scan, start: int) -> int:
        """Where the next call may begin, or -1."""

    def read(self, scan: Scan, start: int) -> Reading | None:
        """Read the call or calls there; None when the text there is not a call after all."""


@dataclass(frozen=True)
class Format:
    """One way models write tool calls."""

    name: str
    reader: Reader | None
    aliases: tuple[str, ...] = ()
    reasoning: Reasoning | None = THINK
    structure: tuple[str, ...] = ()
    """Markers that are neither content nor calls: section brackets, ends of turn."""
    trim: Trim = "newlines"
    """What is trimmed from content next to a call."""
    trim_exactly: str = ""
    """What the template writes between content and the first call; trimmed once when `trim` is verbatim."""
    joined: bool = False
    """Whether text after the calls belongs to the content."""
    segments: Callable[[Text, Start | None], list[Segment]] | None = None
    """For message-structured formats: how to cut the text into segments."""
    between: str = ""
    """What separates the messages of a message-structured format in the content."""
    clean: Callable[[str], str] | None = None
    """Last touch on content and reasoning (citations, for instance)."""
    adapt: Callable[[Text], Format] | None = None
    """For formats whose markers depend on the text: gives the format to parse this text with."""
    models: str = ""
    """Which models write it."""


@dataclass
class Scan:
    """One parse in progress: the text, the region being read, the tools, and how to record a call."""

    text: Text
    tools: Tools
    end: int
    strict: bool = False
    faults: int = 0
    """Broken calls met so far."""
    lookaheads: int = MAX_LOOKAHEADS
    """Tries left to find the end of a value that quotes calls: a bound that keeps hostile text linear."""
    misses: int = 0
    """Openers met so far that turned out to be plain text."""

    @property
    def exhausted(self) -> bool:
        """Whether the text is a degenerate repetition not worth reading further."""
        return self.faults >= MAX_FAULTS or self.misses >= MAX_MISSES

    def call(
        self,
        name: str,
        arguments: Any,
        span: tuple[int, int],
        *,
        complete: bool = True,
        repaired: Sequence[str] = (),
        error: str | None = None,
    ) -> ToolCall:
        """Record one call, applying strictness and the checks every call shares."""
        name = name.strip()
        if error is None and isinstance(arguments, str) and (key := sole_parameter(self.tools.parameters.get(name))):
            arguments, repaired = {key: arguments}, (*repaired, "plain_string")
        if error is None and not isinstance(arguments, dict):
            error = f"The arguments of `{name}` must be one JSON object."
        if error is None and not name:
            error = "The call has no name: write the name of a tool."
        if error is None and self.strict and repaired:
            error = f"The call `{name}` is not written correctly ({', '.join(repaired)})."
        self.faults += error is not None
        unique = tuple(dict.fromkeys(repaired)) if repaired else ()
        return ToolCall(
            name=name,
            arguments=arguments if error is None and isinstance(arguments, dict) else {},
            raw=self.text.raw[span[0] : span[1]],
            span=span,
            complete=complete,
            declared=self.tools.declared(name),
            repaired=unique,
            error=error,
        )

    def noted(self, call: ToolCall, repair: str) -> ToolCall:
        """The same call with one more repair to its name."""
        repaired = (*call.repaired, repair)
        return self.call(
            call.name, call.arguments, call.span, complete=call.complete, repaired=repaired, error=call.error
        )

    def malformed(self, message: str, span: tuple[int, int]) -> Malformed:
        """Record a call that has no readable name."""
        self.faults += 1
        return Malformed(message, self.text.raw[span[0] : span[1]], span)

    def find(self, marker: str, start: int) -> int:
        """Position of a marker inside the region, or -1."""
        place = self.text.find(marker, start)
        return place if place < self.end else -1

    def first(self, markers: Sequence[str], start: int) -> tuple[int, str]:
        """The earliest of several markers inside the region."""
        place, marker = self.text.first(markers, start)
        return (place, marker) if place < self.end else (-1, "")
