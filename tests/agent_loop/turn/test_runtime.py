"""What a tool handler may be, and what it may return."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading

import pytest

from agent_loop.limits import Limits
from agent_loop.loop import HermesAgentLoop
from agent_loop.outcome import Outcome
from agent_loop.turn.runtime import HandlerRuntime, as_outcome
from agent_loop.turn.tool_call import ToolOutcome, ToolStatus
from support.loop_servers import ScriptedServer, call, calls, says, tool, user


@pytest.mark.parametrize(
    ("result", "status", "exit_code"),
    [
        ("plain text", ToolStatus.OK, None),
        ('{"output": "x", "exit_code": 0}', ToolStatus.OK, 0),
        ('{"output": "x", "exit_code": 1, "error": null}', ToolStatus.OK, 1),
        ('{"error": "no such file"}', ToolStatus.ERROR, None),
        ('{"error": "x", "exit_code": -1}', ToolStatus.ERROR, -1),
        ('{"output": "", "exit_code": -1}', ToolStatus.ERROR, -1),
        ('{"exit_code": true}', ToolStatus.OK, None),
        ("{not json", ToolStatus.OK, None),
        ({"error": "dict"}, ToolStatus.ERROR, None),
        (None, ToolStatus.OK, None),
        (ToolOutcome("t", ToolStatus.TIMEOUT), ToolStatus.TIMEOUT, None),
    ],
)
def test_a_handlers_return_value_is_read_for_error_and_exit_code(result, status, exit_code):
    outcome = as_outcome(result)
    assert outcome.status is status
    assert outcome.exit_code == exit_code
    assert isinstance(outcome.text, str)


async def test_a_plain_handler_runs_in_a_thread_and_the_event_loop_goes_on():
    released = threading.Event()

    def handler(name, arguments, task_id):
        assert released.wait(30), "the event loop stood still"
        return "done"

    asyncio.get_running_loop().call_later(0.01, released.set)
    outcome = await HandlerRuntime(handler, [], "t").call("x", {}, call_id="1")
    assert outcome.text == "done"


async def test_a_plain_handler_that_hangs_ends_at_the_timeout_of_the_call():
    released = threading.Event()

    def handler(name, arguments, task_id):
        released.wait()

    server = ScriptedServer(calls(call()), says("done"))
    limits = Limits(tool_timeout_s=0.05)
    result = await HermesAgentLoop(server, [tool()], tool_handler=handler, limits=limits).run(user())
    released.set()
    assert result.outcome is Outcome.FINISHED
    assert [made.status for made in result.tool_calls] == [ToolStatus.TIMEOUT]


async def on_loop(name, arguments, task_id, extra=""):
    return f"{threading.current_thread() is threading.main_thread()}{extra}"


class Callable:
    async def __call__(self, name, arguments, task_id):
        return await on_loop(name, arguments, task_id)


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (on_loop, "True"),
        (functools.partial(on_loop, extra="!"), "True!"),
        (Callable(), "True"),
        (lambda *asked: on_loop(*asked), "True"),
    ],
)
async def test_a_coroutine_runs_on_the_event_loop_however_it_is_given(handler, said):
    assert (await HandlerRuntime(handler, [], "t").call("x", {}, call_id="1")).text == said


@pytest.mark.parametrize("error", [ValueError("bad"), StopIteration(), KeyError("k")])
async def test_what_a_plain_handler_raises_is_a_failed_call(error):
    def handler(name, arguments, task_id):
        raise error

    server = ScriptedServer(calls(call()), says("done"))
    result = await HermesAgentLoop(server, [tool()], tool_handler=handler).run(user())
    assert [made.status for made in result.tool_calls] == [ToolStatus.ERROR]
    assert type(error).__name__ in result.tool_calls[0].error


async def test_context_variables_reach_the_thread():
    where = contextvars.ContextVar("where")
    where.set("here")
    outcome = await HandlerRuntime(lambda *asked: where.get(), [], "t").call("x", {}, call_id="1")
    assert outcome.text == "here"
