"""What the loop asks of tools: schemas, one call, and a few facts about each. The loop knows nothing of sandboxes.

A runtime belongs to one rollout. `call` returns a `ToolOutcome` for everything the model should see, errors included;
it raises `sandbox_pool.errors.SandboxError` when the sandbox itself is gone, which ends the rollout.
`HandlerRuntime` makes a runtime of the earlier system's `tool_handler(name, args, task_id) -> str`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from agent_loop.model.contract import Message, ToolSchema


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


@dataclass(frozen=True)
class NestedCall:
    """A call that a tool made on the model's behalf (execute_code); recorded with its parent."""

    name: str
    arguments: Mapping[str, Any]
    status: ToolStatus
    duration_s: float = 0.0
    exit_code: int | None = None
    result_chars: int = 0
    error: str | None = None


@dataclass(frozen=True)
class ToolOutcome:
    """The result of one call: what the model reads, and what the records keep."""

    text: str
    """What the model reads; always valid JSON for built-in tools."""
    status: ToolStatus = ToolStatus.OK
    exit_code: int | None = None
    error: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    nested: tuple[NestedCall, ...] = ()


class ToolRuntime(Protocol):
    """The tools of one rollout."""

    def schemas(self) -> Sequence[ToolSchema]:
        """The tools the model may call, as OpenAI tool schemas."""

    async def call(self, name: str, arguments: dict[str, Any], *, call_id: str) -> ToolOutcome:
        """Run one call. Cancelling it must stop what it runs."""

    def parallel_safe(self, name: str) -> bool:
        """Whether calls of this tool may run beside other calls of the same turn."""

    def pending_notices(self) -> Sequence[Message]:
        """Messages to put into the conversation before the next turn, each handed out once."""

    async def store_result(self, text: str) -> str | None:
        """Keep an over-long result whole where the model can read it; the path, or None if there is no such place."""


ToolHandler = Callable[[str, dict[str, Any], str], Awaitable[Any]]


class HandlerRuntime:
    """A runtime over `tool_handler(name, args, task_id)`, as the earlier system had it."""

    def __init__(
        self,
        handler: ToolHandler,
        schemas: Sequence[ToolSchema],
        task_id: str,
        parallel_tools: Collection[str] = (),
        base: ToolRuntime | None = None,
    ) -> None:
        self._handler = handler
        self._schemas = list(schemas)
        self._task_id = task_id
        self._parallel = frozenset(parallel_tools)
        self._base = base

    def schemas(self) -> Sequence[ToolSchema]:
        """The schemas given at construction."""
        return self._schemas

    async def call(self, name: str, arguments: dict[str, Any], *, call_id: str) -> ToolOutcome:
        """Ask the handler; its return value is read for an error and an exit code."""
        result = self._handler(name, arguments, self._task_id)
        if inspect.isawaitable(result):
            result = await result
        return as_outcome(result)

    def parallel_safe(self, name: str) -> bool:
        """Only tools named in `parallel_tools`."""
        return name in self._parallel

    def pending_notices(self) -> Sequence[Message]:
        """The notices of the runtime beneath, when there is one."""
        return self._base.pending_notices() if self._base else ()

    async def store_result(self, text: str) -> str | None:
        """Stored by the runtime beneath, when there is one."""
        return await self._base.store_result(text) if self._base else None


def as_outcome(result: Any) -> ToolOutcome:
    """Read a handler's return value: a `ToolOutcome`, a string, or any JSON value.

    A JSON object with a truthy `error`, or with a negative `exit_code`, is a failed call.
    """
    if isinstance(result, ToolOutcome):
        return result
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
    data = _json_object(text)
    exit_code = data.get("exit_code")
    exit_code = exit_code if isinstance(exit_code, int) and not isinstance(exit_code, bool) else None
    error = data.get("error")
    if not error and (exit_code is None or exit_code >= 0):
        return ToolOutcome(text, exit_code=exit_code)
    said = str(error) if error else f"exit code {exit_code}"
    return ToolOutcome(text, ToolStatus.ERROR, exit_code=exit_code, error=said)


def error_text(error: str, **more: Any) -> str:
    """The JSON text of an error result for the model."""
    return json.dumps({"error": error, **more}, ensure_ascii=False)


def _json_object(text: str) -> dict[str, Any]:
    if not text.lstrip().startswith("{"):
        return {}
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
