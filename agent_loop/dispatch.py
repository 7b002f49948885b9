"""Runs the calls of one turn: beside each other when every tool is safe for that, else in order.

Each call runs in its own task with a deadline. At the deadline, on cancellation and when another call lost the sandbox,
the task is cancelled and waited for, so that what it runs is stopped; one that does not stop within the grace period is
left behind rather than hanging the rollout. No exception of a tool leaves this module except cancellation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_loop.limits import Limits, earliest
from agent_loop.runtime import ToolOutcome, ToolRuntime, ToolStatus, error_text
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
