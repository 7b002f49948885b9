"""One tool call: a single object from what the model wrote to the stored record, and the result a tool gives for it."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tool_parsers import Parsed

MALFORMED_NAME = "malformed_tool_call"
"""Name under which unreadable markup stands in the history, so that its error result has a call to answer."""


class ToolStatus(StrEnum):
    """What became of one tool call. Every call the model writes ends in exactly one of these."""

    OK = "ok"
    """Ran, and the tool reports success (a command's own exit code may still be non-zero)."""
    ERROR = "error"
    """Ran, and the tool failed or raised."""
    TIMEOUT = "timeout"
    """Ran, and was stopped at the deadline of the call or of the turn."""
    INVALID = "invalid"
    """Did not run: the arguments are not what the tool's schema asks for."""
    UNKNOWN = "unknown"
    """Did not run: there is no such tool."""
    MALFORMED = "malformed"
    """Did not run: tool markup that is not a call."""
    SKIPPED = "skipped"
    """Did not run: the rollout ended first (a limit, a cut-off turn, a lost sandbox)."""
    CANCELLED = "cancelled"
    """Was stopped because the rollout ended while it ran."""
    LOST = "lost"
    """The sandbox went away while it ran."""


_said: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar(
    "what a stopped call had printed", default=None
)


def output_keeper() -> Callable[[str], None]:
    """For a tool that may be stopped: takes what it had printed until then, for the result of the call it runs in."""
    said = _said.get()

    def keep(output: str) -> None:
        if said is not None and output:
            said.append(output)

    return keep


def collect_output() -> list[str]:
    """What keepers are given from now on, in this context and in tasks that are started from it."""
    said: list[str] = []
    _said.set(said)
    return said


@dataclass(frozen=True)
class ToolOutcome:
    """What a tool gives back for one call: what the model reads, and what the records keep."""

    text: str
    """What the model reads; always valid JSON for built-in tools."""
    status: ToolStatus = ToolStatus.OK
    exit_code: int | None = None
    error: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    nested: tuple[ToolCallRecord, ...] = ()
    """Calls that the tool made on the model's behalf (execute_code); the loop records them with their parent."""


@dataclass
class ToolCallRecord:
    """One tool call. The model's server gives its first fields, and the loop fills in the rest as the call goes on."""

    name: str
    raw_arguments: Any = None
    """As the model wrote them: a dict, JSON text, None, ..."""
    call_id: str = ""
    """Unique in the rollout: the loop replaces ids that are missing or repeated."""
    turn: int = 0
    arguments: dict[str, Any] | None = None
    """As they ran (or would have run); None when they could not be understood."""
    status: ToolStatus | None = None
    """None until the call has ended."""
    schema_valid: bool = False
    """True only when the call fitted its schema as written: nothing was repaired."""
    repairs: tuple[str, ...] = ()
    """Repair classes, the parser's first."""
    duplicate: bool = False
    """An earlier call of this rollout had the same name and arguments."""
    duration_s: float = 0.0
    exit_code: int | None = None
    result_chars: int = 0
    """Length of the tool's whole result, before budgets."""
    stored_path: str | None = None
    """Where the whole of a shortened result is kept."""
    error: str | None = None
    """What went wrong. A server sets it for markup that it recognised but could not read as a call."""
    parent: str | None = None
    """`call_id` of the call that made this one, for calls from inside a script."""
    metadata: dict[str, Any] = field(default_factory=dict)
    text: str = field(default="", repr=False)
    """What the model reads. Not stored with the call: its tool message has it."""
    nested: tuple[ToolCallRecord, ...] = field(default=(), repr=False)
    """Calls that this one made. Stored as calls of their own, with `parent`."""

    @property
    def pending(self) -> bool:
        """Whether it has not ended."""
        return self.status is None

    def finish(self, outcome: ToolOutcome, duration_s: float = 0.0) -> None:
        """Take in how the call ended."""
        self.status = outcome.status
        self.duration_s = duration_s
        self.exit_code = outcome.exit_code
        self.result_chars = len(outcome.text)
        self.error = outcome.error
        self.metadata = dict(outcome.metadata)
        self.text = outcome.text
        self.nested = outcome.nested


def parsed_calls(parsed: Parsed) -> tuple[ToolCallRecord, ...]:
    """The calls of a parse, and a call with an error for each piece of tool markup that is not a call at all."""
    read = (ToolCallRecord(c.name, c.arguments, error=c.error, repairs=tuple(c.repaired)) for c in parsed.calls)
    unread = (ToolCallRecord(MALFORMED_NAME, error=fault.message) for fault in parsed.errors)
    return (*read, *unread)
