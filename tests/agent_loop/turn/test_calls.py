"""Dispatch: order, parallelism, deadlines, lost sandboxes, cancellation that reaches the call."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agent_loop.limits import Limits
from agent_loop.turn.calls import Dispatcher
from agent_loop.turn.tool_call import ToolCallRecord, ToolOutcome, ToolStatus, output_keeper
from sandbox_pool.errors import SandboxFileError, SandboxLost

Act = Callable[[str], Awaitable[ToolOutcome]]


class Runtime:
    """Runs `act(call_id)`; remembers when calls start and stop."""

    def __init__(self, act: Act, safe: bool = False) -> None:
        self._act = act
        self._safe = safe
        self.log: list[str] = []

    def schemas(self) -> list[Any]:
        return []

    async def call(self, name: str, arguments: dict[str, Any], *, call_id: str) -> ToolOutcome:
        self.log.append(f"+{call_id}")
        try:
            return await self._act(call_id)
        except asyncio.CancelledError:
            self.log.append(f"!{call_id}")
            raise
        finally:
            self.log.append(f"-{call_id}")

    def parallel_safe(self, name: str) -> bool:
        return self._safe

    async def wait_for_notice(self) -> bool:
        return False

    def pending_notices(self) -> list[Any]:
        return []

    async def store_result(self, text: str) -> str | None:
        return None


async def fine(call_id: str) -> ToolOutcome:
    await asyncio.sleep(0)
    return ToolOutcome(call_id)


async def forever(call_id: str) -> ToolOutcome:
    await asyncio.Event().wait()
    raise AssertionError


def ready(*ids: str) -> dict[str, ToolCallRecord]:
    return {call_id: ToolCallRecord("t", {}, call_id, arguments={}) for call_id in ids}


async def run(runtime: Runtime, *ids: str, deadline: float | None = None, **limits: Any) -> dict[str, ToolCallRecord]:
    calls = ready(*ids)
    await Dispatcher(runtime, Limits(**limits)).run(list(calls.values()), deadline)
    return calls


def statuses(calls: dict[str, ToolCallRecord]) -> dict[str, str]:
    return {call_id: str(call.status) for call_id, call in calls.items() if not call.pending}


async def test_unsafe_tools_run_in_order_one_at_a_time():
    runtime = Runtime(fine)
    done = await run(runtime, "a", "b", "c")
    assert runtime.log == ["+a", "-a", "+b", "-b", "+c", "-c"]
    assert [call.text for call in done.values()] == ["a", "b", "c"]


async def test_safe_tools_overlap_up_to_the_cap():
    runtime = Runtime(fine, safe=True)
    await run(runtime, "a", "b", "c", max_parallel_calls=2)
    assert runtime.log[:2] == ["+a", "+b"]
    assert runtime.log.index("+c") > min(runtime.log.index("-a"), runtime.log.index("-b"))


async def test_a_call_is_stopped_at_its_own_timeout_and_the_next_one_runs():
    async def act(call_id: str) -> ToolOutcome:
        return await (forever if call_id == "a" else fine)(call_id)

    runtime = Runtime(act)
    done = await run(runtime, "a", "b", tool_timeout_s=0.05)
    assert statuses(done) == {"a": "timeout", "b": "ok"}
    assert "!a" in runtime.log


async def test_the_turns_deadline_stops_the_running_call_and_the_following_never_start():
    runtime = Runtime(forever)
    done = await run(runtime, "a", "b", deadline=asyncio.get_running_loop().time() + 0.05)
    assert statuses(done) == {"a": "timeout", "b": "skipped"}
    assert "+b" not in runtime.log


async def test_a_timeout_that_the_tool_raises_itself_is_its_error_not_ours():
    async def act(call_id: str) -> ToolOutcome:
        raise TimeoutError("upstream took too long")

    done = await run(Runtime(act), "a")
    assert statuses(done) == {"a": "error"}
    assert "upstream took too long" in done["a"].text


@pytest.mark.parametrize(
    "error", [ValueError("x"), SandboxFileError(2, "No such file", "a.txt"), asyncio.CancelledError()]
)
async def test_what_a_tool_raises_becomes_an_error_result(error):
    async def act(call_id: str) -> ToolOutcome:
        raise error

    assert statuses(await run(Runtime(act), "a", "b")) == {"a": "error", "b": "error"}


async def test_a_lost_sandbox_ends_the_turn_in_order():
    async def act(call_id: str) -> ToolOutcome:
        raise SandboxLost("host died")

    runtime = Runtime(act)
    done = await run(runtime, "a", "b")
    assert statuses(done) == {"a": "lost"}
    assert "+b" not in runtime.log


async def test_a_lost_sandbox_stops_the_calls_that_run_with_it():
    async def act(call_id: str) -> ToolOutcome:
        if call_id == "b":
            raise SandboxLost("host died")
        return await forever(call_id)

    runtime = Runtime(act, safe=True)
    done = await run(runtime, "a", "b")
    assert statuses(done) == {"a": "cancelled", "b": "lost"}
    assert "!a" in runtime.log


@pytest.mark.parametrize("safe", [True, False])
async def test_cancellation_reaches_the_running_call_and_keeps_what_was_done(safe):
    started = asyncio.Event()

    async def act(call_id: str) -> ToolOutcome:
        if call_id == "a":
            return ToolOutcome("first")
        started.set()
        return await forever(call_id)

    runtime = Runtime(act, safe=safe)
    done = ready("a", "b")
    task = asyncio.create_task(Dispatcher(runtime, Limits()).run(list(done.values()), None))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert statuses(done) == {"a": "ok", "b": "cancelled"}
    assert "!b" in runtime.log


async def test_a_call_that_ignores_cancellation_is_left_behind_after_the_grace_period():
    release = asyncio.Event()

    async def act(call_id: str) -> ToolOutcome:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return ToolOutcome("too late")

    done = await run(Runtime(act), "a", tool_timeout_s=0.02, cancel_grace_s=0.02)
    assert statuses(done) == {"a": "timeout"}
    release.set()
    await asyncio.sleep(0)


async def test_durations_are_measured():
    async def act(call_id: str) -> ToolOutcome:
        await asyncio.sleep(0.02)
        return ToolOutcome("ok", ToolStatus.OK, exit_code=3)

    done = await run(Runtime(act), "a")
    assert done["a"].duration_s > 0.01
    assert done["a"].exit_code == 3


async def test_what_a_call_had_printed_when_it_was_stopped_is_in_its_result() -> None:
    async def prints(call_id: str) -> ToolOutcome:
        try:
            await forever(call_id)
        finally:
            output_keeper()(f"half of {call_id}")
        raise AssertionError

    done = await run(Runtime(prints, safe=True), "a", "b", tool_timeout_s=0.05)
    assert [json.loads(call.text)["output"] for call in done.values()] == ["half of a", "half of b"]
    assert statuses(done) == {"a": "timeout", "b": "timeout"}
    calls = ready("c")
    running = asyncio.create_task(Dispatcher(Runtime(prints), Limits()).run(list(calls.values()), None))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (calls["c"].status, json.loads(calls["c"].text)["output"]) == (ToolStatus.CANCELLED, "half of c")
    output_keeper()("of nobody")
