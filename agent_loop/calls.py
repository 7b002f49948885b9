"""From a call as the model wrote it to a call that may run, or to the refusal that the model reads."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agent_loop.arguments import normalize
from agent_loop.dispatch import ReadyCall
from agent_loop.messages import shown
from agent_loop.model import ModelCall, ToolSchema
from agent_loop.result import ToolCallRecord
from agent_loop.runtime import ToolOutcome, ToolStatus, error_text


@dataclass
class PlannedCall:
    """One call of a turn: its record, and either what to run or why not."""

    call: ModelCall
    record: ToolCallRecord
    ready: ReadyCall | None = None
    refusal: ToolOutcome | None = None


class CallPlanner:
    """Checks calls against the tools of one rollout and remembers them, to know duplicates."""

    def __init__(self, tools: Sequence[ToolSchema], valid_names: Collection[str]) -> None:
        self._names = sorted(valid_names)
        self._parameters = {name: _parameters(tools, name) for name in self._names}
        self._seen: set[tuple[str, bytes]] = set()

    def plan(self, call: ModelCall, turn: int) -> PlannedCall:
        """Decide what one settled call is. Never raises."""
        record = ToolCallRecord(turn, call.id or "", call.name, call.arguments, None, ToolStatus.SKIPPED)
        record.repairs = call.repaired
        planned = PlannedCall(call, record)
        if call.error is not None:
            planned.refusal = _refuse(
                ToolStatus.MALFORMED, f"Your tool call could not be read and was not run: {call.error}"
            )
        elif call.name not in self._parameters:
            planned.refusal = _refuse(ToolStatus.UNKNOWN, self._unknown(call.name), available_tools=self._names)
        else:
            self._normalize(planned)
        return planned

    def _normalize(self, planned: PlannedCall) -> None:
        call, record = planned.call, planned.record
        normalized = normalize(call.arguments, call.name, self._parameters[call.name])
        record.repairs = (*call.repaired, *normalized.repairs)
        record.schema_valid = normalized.schema_valid and not call.repaired
        if normalized.arguments is None:
            planned.refusal = _refuse(ToolStatus.INVALID, normalized.error or "Invalid arguments.")
            return
        record.arguments = normalized.arguments
        record.duplicate = self._is_duplicate(call.name, normalized.arguments)
        planned.ready = ReadyCall(record.call_id, call.name, normalized.arguments)

    def _is_duplicate(self, name: str, arguments: Mapping[str, Any]) -> bool:
        try:
            key = (name, orjson.dumps(arguments, option=orjson.OPT_SORT_KEYS))
        except orjson.JSONEncodeError:
            key = (name, shown(arguments).encode("utf-8", "replace"))  # integers beyond 64 bits, deep nesting
        known = key in self._seen
        self._seen.add(key)
        return known

    def _unknown(self, name: str) -> str:
        near = difflib.get_close_matches(name[:100], self._names, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        return f"Unknown tool: {name[:100]!r}. Available tools: {', '.join(self._names) or 'none'}.{hint}"


def _refuse(status: ToolStatus, error: str, **more: Any) -> ToolOutcome:
    return ToolOutcome(error_text(error, **more), status, error=error)


def _parameters(tools: Sequence[ToolSchema], name: str) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            return function.get("parameters") or {}
    return {}
