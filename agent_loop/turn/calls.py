"""The tool half of a turn: check the calls, run them, keep them as records, and give back one message per call."""

from __future__ import annotations

import asyncio
import contextvars
import difflib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from agent_loop.context.result_budget import ResultBudget, apply_budget, shorten_result
from agent_loop.limits import Limits
from agent_loop.model.contract import Message, ModelTurn, ToolSchema
from agent_loop.outcome import Outcome
from agent_loop.records.record import ToolError, TurnRecord
from agent_loop.turn.arguments import normalize
from agent_loop.turn.messages import sendable, shown, tool_message
from agent_loop.turn.runtime import ToolRuntime, error_text
from agent_loop.turn.tool_call import ToolCallRecord, ToolOutcome, ToolStatus, collect_output
from sandbox_pool.errors import SandboxDestroyed, SandboxError, SandboxFileError

log = logging.getLogger(__name__)

_FAILED = frozenset(
    {
        ToolStatus.ERROR,
        ToolStatus.TIMEOUT,
        ToolStatus.INVALID,
        ToolStatus.UNKNOWN,
        ToolStatus.MALFORMED,
        ToolStatus.LOST,
    }
)


class ToolTurns:
    """Runs the calls of each turn of one rollout and keeps the records of all of them."""

    def __init__(self, runtime: ToolRuntime, planner: CallPlanner, limits: Limits, budget: ResultBudget) -> None:
        self.records: list[ToolCallRecord] = []
        self.errors: list[ToolError] = []
        self.lost: str | None = None
        """What the sandbox said when it was lost."""
        self._runtime = runtime
        self._planner = planner
        self._limits = limits
        self._budget = budget
        self._dispatcher = Dispatcher(runtime, limits)
        self._calls_run = 0

    def skip(self, turn: ModelTurn, record: TurnRecord, reason: str) -> list[Message]:
        """Answer every call of a turn without running it."""
        for call in turn.calls:
            self._planner.plan(call, record.turn)
            call.finish(_not_run(reason))
        return self._close(turn.calls)

    async def run(
        self, turn: ModelTurn, record: TurnRecord, deadline: float | None, results: list[Message]
    ) -> Outcome | None:
        """Run the calls and fill `results`, on cancellation too; the outcome if this ends the rollout."""
        for call in turn.calls:
            self._planner.plan(call, record.turn)
        beyond = self._hold_back(turn.calls)
        ready = [call for call in turn.calls if call.pending]
        self._calls_run += len(ready)
        record.parallel = self._dispatcher.parallel(ready)
        try:
            await self._dispatcher.run(ready, deadline)
            _end(turn.calls)
            await apply_budget(turn.calls, self._budget, self._runtime.store_result)
        finally:
            _end(turn.calls)
            results += self._close(turn.calls)
        if self.lost is not None:
            # The error begins with the kind of the fault; this one is the agent's own doing.
            return Outcome.AGENT_FAULT if self.lost.startswith(SandboxDestroyed.__name__) else Outcome.SANDBOX_LOST
        return Outcome.MAX_TOOL_CALLS if beyond else None

    def _hold_back(self, calls: Sequence[ToolCallRecord]) -> bool:
        """Refuse calls beyond `max_tool_calls`; whether there were any."""
        if self._limits.max_tool_calls is None:
            return False
        allowed = self._limits.max_tool_calls - self._calls_run
        beyond = [call for call in calls if call.pending][max(allowed, 0) :]
        for call in beyond:
            call.finish(_not_run(f"the limit of {self._limits.max_tool_calls} tool calls is reached"))
        return bool(beyond)

    def _close(self, calls: Sequence[ToolCallRecord]) -> list[Message]:
        """Records and one tool message for every call."""
        for call in calls:
            # Results of an interrupted turn are still whole. They are not stored: the sandbox may be gone.
            limit = self._budget.limit_for(call.name)
            call.text = sendable(call.text if limit is None else shorten_result(call.name, call.text, limit))
            self.records.append(call)
            self.records.extend(_nested(call, index, made) for index, made in enumerate(call.nested))
            if call.status in _FAILED:
                self.errors.append(_tool_error(call))
            if call.status is ToolStatus.LOST:
                self.lost = call.error or "the sandbox was lost"
        return [tool_message(call) for call in calls]


def _end(calls: Sequence[ToolCallRecord]) -> None:
    for call in calls:
        if call.pending:
            call.finish(_not_run("the rollout ended first"))


def _nested(parent: ToolCallRecord, index: int, call: ToolCallRecord) -> ToolCallRecord:
    return replace(
        call,
        turn=parent.turn,
        call_id=f"{parent.call_id}/{index}",
        schema_valid=call.status not in (ToolStatus.INVALID, ToolStatus.UNKNOWN),
        parent=parent.call_id,
        text="",  # the script read it, not the model
    )


def _tool_error(call: ToolCallRecord) -> ToolError:
    raw: Any = call.raw_arguments
    arguments = raw if isinstance(raw, str) else shown(raw)
    return ToolError(call.turn, call.name, arguments[:200], call.error or "", call.text[:500])


class CallPlanner:
    """Checks calls against the tools of one rollout and remembers them, to know duplicates."""

    def __init__(
        self, tools: Sequence[ToolSchema], valid_names: Collection[str], unlisted: Sequence[ToolSchema] = ()
    ) -> None:
        """`unlisted` tools may be called, but are told to nobody who asks for another one."""
        self._names = sorted(valid_names)
        self._parameters = {name: _parameters(tools, name) for name in self._names}
        self._parameters |= {tool["function"]["name"]: tool["function"]["parameters"] for tool in unlisted}
        self._seen: set[tuple[str, bytes]] = set()

    def plan(self, call: ToolCallRecord, turn: int) -> None:
        """Make one settled call ready to run, or end it with the refusal that the model reads. Never raises."""
        call.turn = turn
        if call.error is not None:
            _refuse(call, ToolStatus.MALFORMED, f"Your tool call could not be read and was not run: {call.error}")
        elif call.name not in self._parameters:
            _refuse(call, ToolStatus.UNKNOWN, self._unknown(call.name), available_tools=self._names)
        else:
            self._normalize(call)

    def _normalize(self, call: ToolCallRecord) -> None:
        normalized = normalize(call.raw_arguments, call.name, self._parameters[call.name])
        call.schema_valid = normalized.schema_valid and not call.repairs
        call.repairs = (*call.repairs, *normalized.repairs)
        if normalized.arguments is None:
            _refuse(call, ToolStatus.INVALID, normalized.error or "Invalid arguments.")
            return
        call.arguments = normalized.arguments
        call.duplicate = self._is_duplicate(call.name, normalized.arguments)

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


def _refuse(call: ToolCallRecord, status: ToolStatus, error: str, **more: Any) -> None:
    call.finish(_failed(status, error, **more))


def _parameters(tools: Sequence[ToolSchema], name: str) -> dict[str, Any]:
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            return function.get("parameters") or {}
    return {}


class Dispatcher:
    """Runs calls on one runtime under one set of limits. Deadlines are moments on the event loop's clock."""

    def __init__(self, runtime: ToolRuntime, limits: Limits) -> None:
        self._runtime = runtime
        self._limits = limits
        self._left_behind: set[asyncio.Task[ToolOutcome]] = set()

    def parallel(self, calls: Sequence[ToolCallRecord]) -> bool:
        """Whether these calls will run at the same time."""
        return len(calls) > 1 and all(self._runtime.parallel_safe(call.name) for call in calls)

    async def run(self, calls: Sequence[ToolCallRecord], deadline: float | None) -> None:
        """Run planned calls; `deadline` is the turn's or the rollout's, whichever is first.

        On cancellation calls that ran have ended or were stopped; calls that never started are still pending.
        """
        if self.parallel(calls):
            await self._run_together(calls, deadline)
            return
        for call in calls:
            await self._run_one(call, deadline)
            if call.status is ToolStatus.LOST:
                return

    async def _run_together(self, calls: Sequence[ToolCallRecord], deadline: float | None) -> None:
        at_once = asyncio.Semaphore(self._limits.max_parallel_calls)
        lost = asyncio.Event()

        async def run(call: ToolCallRecord) -> None:
            async with at_once:
                if lost.is_set():
                    return
                await self._run_one(call, deadline, stop=lost)
                if call.status is ToolStatus.LOST:
                    lost.set()

        async with asyncio.TaskGroup() as group:
            for call in calls:
                group.create_task(run(call))

    async def _run_one(self, call: ToolCallRecord, deadline: float | None, stop: asyncio.Event | None = None) -> None:
        clock = asyncio.get_running_loop().time
        started = clock()
        allowed = self._limits.tool_timeout_s
        until = earliest(deadline, started + allowed if allowed is not None else None)
        if until is not None and until <= started:
            call.finish(_not_run("the time of this turn was up"))
            return
        context = contextvars.copy_context()
        said = context.run(collect_output)
        work = self._runtime.call(call.name, call.arguments or {}, call_id=call.call_id)
        task = asyncio.create_task(work, context=context)
        try:
            await _first(task, stop, None if until is None else until - clock())
            if task.done():
                call.finish(_read(task), clock() - started)
                return
            spent_s = clock() - started
            await self._stop(task)
            stopped = stop is not None and stop.is_set()
            end = _interrupted("the sandbox was lost", said) if stopped else _timed_out(call.name, spent_s, said)
            call.finish(end, spent_s)
        except asyncio.CancelledError:
            spent_s = clock() - started
            call.finish(_interrupted("the rollout was cancelled", said), spent_s)
            await self._stop(task)
            call.finish(_interrupted("the rollout was cancelled", said), spent_s)
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


def earliest(*moments: float | None) -> float | None:
    """The first of several deadlines on the event loop's clock; None is never."""
    known = [moment for moment in moments if moment is not None]
    return min(known) if known else None


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


def _read(task: asyncio.Task[ToolOutcome]) -> ToolOutcome:
    """The outcome of a finished task; what it raised becomes a result."""
    if task.cancelled():
        return _failed(ToolStatus.ERROR, "The tool stopped itself.")
    error = task.exception()
    if error is None:
        return task.result()
    said = f"{type(error).__name__}: {error}"[:2000]
    if isinstance(error, SandboxError) and not isinstance(error, SandboxFileError):
        return _failed(ToolStatus.LOST, said)
    if not isinstance(error, Exception):
        raise error  # KeyboardInterrupt, SystemExit: not ours to answer
    return _failed(ToolStatus.ERROR, said)


def _not_run(reason: str) -> ToolOutcome:
    return _failed(ToolStatus.SKIPPED, f"Not run: {reason}.")


def _timed_out(name: str, spent_s: float, said: list[str]) -> ToolOutcome:
    return _failed(ToolStatus.TIMEOUT, f"{name} was stopped after {spent_s:.1f} s: it took too long.", **_output(said))


def _interrupted(reason: str, said: list[str]) -> ToolOutcome:
    return _failed(ToolStatus.CANCELLED, f"Stopped: {reason}.", **_output(said))


def _output(said: list[str]) -> dict[str, str]:
    return {"output": "".join(said)} if said else {}


def _failed(status: ToolStatus, said: str, **more: Any) -> ToolOutcome:
    return ToolOutcome(error_text(said, **more), status, error=said)
