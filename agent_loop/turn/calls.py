"""From a call as the model wrote it to a call that may run, or to the refusal that the model reads."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agent_loop.limits import Limits, earliest
from agent_loop.model.contract import ModelCall, ToolSchema
from agent_loop.records.result import ToolCallRecord
from agent_loop.turn.arguments import normalize
from agent_loop.turn.messages import shown
from agent_loop.turn.runtime import ToolOutcome, ToolRuntime, ToolStatus, error_text
from sandbox_pool.errors import SandboxError, SandboxFileError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReadyCall:
    """A call that may run: known tool, normalized arguments."""

    call_id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Executed:
    """A call that ran, or was to run."""

    outcome: ToolOutcome
    duration_s: float = 0.0


class Dispatcher:
    """Runs calls on one runtime under one set of limits. Deadlines are moments on the event loop's clock."""

    def __init__(self, runtime: ToolRuntime, limits: Limits) -> None:
        self._runtime = runtime
        self._limits = limits
        self._left_behind: set[asyncio.Task[ToolOutcome]] = set()

    def parallel(self, calls: Sequence[ReadyCall]) -> bool:
        """Whether these calls will run beside each other."""
        return len(calls) > 1 and all(self._runtime.parallel_safe(call.name) for call in calls)

    async def run(self, calls: Sequence[ReadyCall], deadline: float | None, done: dict[str, Executed]) -> None:
        """Fill `done` by call id; `deadline` is the turn's or the rollout's, whichever is first.

        On cancellation `done` holds what had ended or was stopped; calls that never started are missing.
        """
        if self.parallel(calls):
            await self._beside(calls, deadline, done)
            return
        for call in calls:
            executed = done[call.call_id] = await self._run_one(call, deadline, done)
            if executed.outcome.status is ToolStatus.LOST:
                return

    async def _beside(self, calls: Sequence[ReadyCall], deadline: float | None, done: dict[str, Executed]) -> None:
        gate = asyncio.Semaphore(self._limits.max_parallel_calls)
        lost = asyncio.Event()

        async def gated(call: ReadyCall) -> None:
            async with gate:
                if lost.is_set():
                    return
                executed = done[call.call_id] = await self._run_one(call, deadline, done, stop=lost)
                if executed.outcome.status is ToolStatus.LOST:
                    lost.set()

        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(gated(call))

    async def _run_one(
        self, call: ReadyCall, deadline: float | None, done: dict[str, Executed], stop: asyncio.Event | None = None
    ) -> Executed:
        clock = asyncio.get_running_loop().time
        started = clock()
        allowed = self._limits.tool_timeout_s
        until = earliest(deadline, started + allowed if allowed is not None else None)
        if until is not None and until <= started:
            return Executed(not_run("the time of this turn was up"))
        task = asyncio.create_task(self._runtime.call(call.name, call.arguments, call_id=call.call_id))
        try:
            await _first(task, stop, None if until is None else until - clock())
            if task.done():
                return Executed(_read(task), clock() - started)
            spent_s = clock() - started
            await self._stop(task)
            stopped = stop is not None and stop.is_set()
            return Executed(_interrupted("the sandbox was lost") if stopped else _timed_out(call, spent_s), spent_s)
        except asyncio.CancelledError:
            done[call.call_id] = Executed(_interrupted("the rollout was cancelled"), clock() - started)
            await self._stop(task)
            raise

    async def _stop(self, task: asyncio.Task[ToolOutcome]) -> None:
        task.cancel()
        await asyncio.wait({task}, timeout=self._limits.cancel_grace_s)
        if task.done():
            if not task.cancelled():
                task.exception()  # retrieved: whatever it says, the call was stopped
            return
        log.error("a tool call ignored its cancellation for %.0f s and is left behind", self._limits.cancel_grace_s)
        self._left_behind.add(task)
        task.add_done_callback(self._left_behind.discard)


def not_run(reason: str) -> ToolOutcome:
    """The result of a call that never started."""
    said = f"Not run: {reason}."
    return ToolOutcome(error_text(said), ToolStatus.SKIPPED, error=said)


def _timed_out(call: ReadyCall, spent_s: float) -> ToolOutcome:
    said = f"{call.name} was stopped after {spent_s:.1f} s: it took too long."
    return ToolOutcome(error_text(said), ToolStatus.TIMEOUT, error=said)


async def _first(task: asyncio.Task[ToolOutcome], stop: asyncio.Event | None, timeout_s: float | None) -> None:
    """Wait for the task, the stop signal or the timeout, whichever comes first."""
    if stop is None:
        await asyncio.wait({task}, timeout=timeout_s)
        return
    signal = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, signal}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        signal.cancel()


def _interrupted(reason: str) -> ToolOutcome:
    said = f"Stopped: {reason}."
    return ToolOutcome(error_text(said), ToolStatus.CANCELLED, error=said)


def _read(task: asyncio.Task[ToolOutcome]) -> ToolOutcome:
    """The outcome of a finished task; what it raised becomes a result."""
    if task.cancelled():
        said = "The tool stopped itself."
        return ToolOutcome(error_text(said), ToolStatus.ERROR, error=said)
    error = task.exception()
    if error is None:
        return task.result()
    said = f"{type(error).__name__}: {error}"[:2000]
    if isinstance(error, SandboxError) and not isinstance(error, SandboxFileError):
        return ToolOutcome(error_text(said), ToolStatus.LOST, error=said)
    if not isinstance(error, Exception):
        raise error  # KeyboardInterrupt, SystemExit: not ours to answer
    return ToolOutcome(error_text(said), ToolStatus.ERROR, error=said)


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
