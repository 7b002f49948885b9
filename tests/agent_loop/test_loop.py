"""HermesAgentLoop: hermes-agent's behaviour, and what is new around it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import agent_loop
from agent_loop.context.result_budget import ResultBudget
from agent_loop.context.window import ContextPolicy
from agent_loop.limits import Limits
from agent_loop.loop import HermesAgentLoop
from agent_loop.model.contract import Message, ModelRefused, ModelTurn, Sampling, ToolSchema
from agent_loop.outcome import Outcome
from agent_loop.records.record import AgentResult, RolloutRecord
from agent_loop.records.verify import verify
from agent_loop.turn.tool_call import ToolCallRecord, ToolOutcome, ToolStatus
from sandbox_pool.errors import SandboxLost
from support.loop_servers import ScriptedServer, assert_paired, call, calls, echo, record_of, says, tool, user
from support.pool_wait import eventually


class Runtime:
    """A tool runtime for one rollout: `act` decides, notices are handed out once."""

    def __init__(self, act: Any, notices: Sequence[Message] = ()) -> None:
        self._act = act
        self._notices = list(notices)
        self.stored: list[str] = []

    def schemas(self) -> list[ToolSchema]:
        return [tool()]

    async def call(self, name: str, arguments: dict[str, Any], *, call_id: str) -> ToolOutcome:
        outcome = self._act(name, arguments)
        if isinstance(outcome, Exception):
            raise outcome
        assert isinstance(outcome, ToolOutcome)
        return outcome

    def parallel_safe(self, name: str) -> bool:
        return False

    async def wait_for_notice(self) -> bool:
        return False

    def pending_notices(self) -> list[Message]:
        given, self._notices = self._notices, []
        return given

    async def store_result(self, text: str) -> str:
        self.stored.append(text)
        return f"/results/{len(self.stored)}"


def test_a_result_has_the_earlier_fields_with_the_earlier_defaults():
    result = AgentResult(messages=[])
    assert result.managed_state is None
    assert result.turns_used == 0
    assert result.finished_naturally is False
    assert result.reasoning_per_turn == []
    assert result.tool_errors == []
    assert not result.outcome.trainable


def test_the_managed_state_may_be_made_when_it_is_first_read():
    made = []
    result = AgentResult([], lambda: made.append("now") or {"nodes": [1]})
    assert not made
    assert result.managed_state == result.managed_state == {"nodes": [1]}
    assert made == ["now"]
    assert AgentResult(messages=[], managed_state={"nodes": []}).managed_state == {"nodes": []}


async def test_a_text_answer_ends_the_rollout():
    messages = user()
    result = await HermesAgentLoop(ScriptedServer(says("hello")), [tool()], {"terminal"}, tool_handler=echo).run(
        messages
    )
    assert result.outcome is Outcome.FINISHED
    assert result.finished_naturally
    assert result.turns_used == 1
    assert result.messages is messages
    assert messages[-1] == {"role": "assistant", "content": "hello"}


async def test_calls_results_and_answer_alternate():
    server = ScriptedServer(calls(call(), call(arguments={"command": "pwd"})), says("done"))
    result = await HermesAgentLoop(server, [tool()], {"terminal"}, tool_handler=echo).run(user())
    assert [m["role"] for m in result.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert json.loads(result.messages[3]["content"])["output"] == 'terminal {"command": "pwd"}'
    assert_paired(result.messages)


async def test_the_handler_gets_name_arguments_and_task_id():
    seen: list[Any] = []

    async def handler(name: str, arguments: dict[str, Any], task_id: str) -> str:
        seen.append((name, arguments, task_id))
        return "ok"

    server = ScriptedServer(calls(call()), says("done"))
    await HermesAgentLoop(server, [tool()], {"terminal"}, task_id="t-1", tool_handler=handler).run(user())
    assert seen == [("terminal", {"command": "ls"}, "t-1")]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_handler_that_ends_the_program_is_a_failed_call(waits: bool):
    def handler(name: str, arguments: dict[str, Any], task_id: str) -> str:
        sys.exit(3)

    async def waiting(name: str, arguments: dict[str, Any], task_id: str) -> str:
        return handler(name, arguments, task_id)

    server = ScriptedServer(calls(call()), says("done"))
    result = await HermesAgentLoop(server, [tool()], tool_handler=waiting if waits else handler).run(user())
    assert json.loads(result.messages[2]["content"]) == {"error": "RuntimeError: it called sys.exit(3)"}
    assert result.finished_naturally


async def test_a_handler_that_raises_gives_the_model_type_and_text():
    async def handler(name: str, arguments: dict[str, Any], task_id: str) -> str:
        raise KeyError("missing")

    result = await HermesAgentLoop(ScriptedServer(calls(call()), says("done")), [tool()], tool_handler=handler).run(
        user()
    )
    assert json.loads(result.messages[2]["content"]) == {"error": "KeyError: 'missing'"}
    assert result.tool_errors[0].tool_name == "terminal"
    assert result.tool_errors[0].turn == 1


async def test_an_unknown_tool_is_answered_with_the_tools_there_are():
    server = ScriptedServer(calls(call("termnal")), says("done"))
    result = await HermesAgentLoop(server, [tool()], {"terminal"}, tool_handler=echo).run(user())
    told = json.loads(result.messages[2]["content"])
    assert told["available_tools"] == ["terminal"]
    assert "Did you mean terminal?" in told["error"]
    assert result.tool_calls[0].status is ToolStatus.UNKNOWN


async def test_a_tool_with_a_schema_that_is_not_in_valid_tool_names_is_unknown():
    server = ScriptedServer(calls(call("secret", {})), says("done"))
    tools = [tool(), tool("secret", required=())]
    result = await HermesAgentLoop(server, tools, {"terminal"}, tool_handler=echo).run(user())
    assert result.tool_calls[0].status is ToolStatus.UNKNOWN


async def test_tools_without_anything_to_run_them_are_refused_at_once():
    with pytest.raises(ValueError, match="tool_handler"):
        HermesAgentLoop(ScriptedServer(), [tool()])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"limits": Limits(), "max_turns": 5}, "max_turns"),
        ({"sampling": Sampling(), "temperature": 0.2}, "temperature"),
        ({"context": ContextPolicy(), "max_context_tokens": 100}, "max_context_tokens"),
    ],
)
def test_a_value_that_would_be_overridden_silently_is_refused(options, named):
    with pytest.raises(ValueError, match=named):
        HermesAgentLoop(ScriptedServer(), **options)


def test_the_names_users_need_are_at_the_top():
    assert agent_loop.HermesAgentLoop is HermesAgentLoop
    assert agent_loop.AgentResult is AgentResult
    with pytest.raises(AttributeError, match="Nonsense"):
        _ = agent_loop.Nonsense


async def test_a_runtime_brings_its_own_schemas():
    runtime = Runtime(lambda name, arguments: ToolOutcome('{"ok": true}', exit_code=0))
    result = await HermesAgentLoop(ScriptedServer(calls(call()), says("done")), runtime=runtime).run(user())
    assert result.tool_calls_executed_ok == 1
    assert result.tool_calls[0].exit_code == 0


async def test_notices_come_before_the_next_turn_once():
    notice = {"role": "user", "content": "[process 7 finished]"}
    runtime = Runtime(lambda name, arguments: ToolOutcome("ok"), [notice])
    server = ScriptedServer(calls(call()), says("done"))
    result = await HermesAgentLoop(server, runtime=runtime).run(user())
    assert server.conversations[0].prompts[0][-1] == notice
    assert result.messages.count(notice) == 1


async def test_nested_calls_are_recorded_with_their_parent_and_counted_apart():
    nested = (ToolCallRecord("read_file", {"path": "a"}, status=ToolStatus.OK, duration_s=0.1, result_chars=5),)
    runtime = Runtime(lambda name, arguments: ToolOutcome("ok", nested=nested))
    result = await HermesAgentLoop(ScriptedServer(calls(call()), says("done")), runtime=runtime).run(user())
    outer, inner = result.tool_calls
    assert inner.parent == outer.call_id
    assert inner.name == "read_file"
    assert result.tool_calls_attempted == 1
    assert result.metrics["nested_calls"] == 1


async def test_a_long_result_is_shortened_with_the_path_of_the_whole():
    runtime = Runtime(lambda name, arguments: ToolOutcome(json.dumps({"output": "x" * 5000})))
    loop = HermesAgentLoop(
        ScriptedServer(calls(call()), says("done")), runtime=runtime, budget_config=ResultBudget(per_result_chars=1000)
    )
    result = await loop.run(user())
    shown = result.messages[2]["content"]
    assert len(shown) <= 1000
    assert "/results/1" in json.loads(shown)["truncated"]
    assert json.loads(runtime.stored[0]) == {"output": "x" * 5000}
    assert result.tool_calls[0].stored_path == "/results/1"
    assert result.tool_calls[0].result_chars == len(runtime.stored[0])


async def test_a_lost_sandbox_ends_the_rollout_untrainable_and_paired():
    runtime = Runtime(lambda name, arguments: SandboxLost("host died"))
    result = await HermesAgentLoop(ScriptedServer(calls(call(), call())), runtime=runtime).run(user())
    assert result.outcome is Outcome.SANDBOX_LOST
    assert not result.outcome.trainable
    assert "host died" in (result.error or "")
    assert [record.status for record in result.tool_calls] == [ToolStatus.LOST, ToolStatus.SKIPPED]
    assert_paired(result.messages)


async def test_a_sandbox_lost_between_turns_ends_the_rollout_too():
    runtime = Runtime(lambda name, arguments: ToolOutcome("ok"))

    def notices() -> list[Message]:
        raise SandboxLost("gone")

    runtime.pending_notices = notices  # type: ignore[method-assign]
    result = await HermesAgentLoop(ScriptedServer(), runtime=runtime).run(user())
    assert result.outcome is Outcome.SANDBOX_LOST


async def test_duplicate_calls_are_marked_whatever_the_order_of_keys():
    two = tool("f", required=(), a={"type": "integer"}, b={"type": "integer"})
    server = ScriptedServer(
        calls(call("f", {"a": 1, "b": 2}), call("f", '{"b": 2, "a": 1}'), call("f", {"a": 1})), says("done")
    )
    result = await HermesAgentLoop(server, [two], tool_handler=echo).run(user())
    assert [record.duplicate for record in result.tool_calls] == [False, True, False]
    assert result.metrics["duplicate_rate"] == pytest.approx(1 / 3)


async def test_a_handler_with_half_a_surrogate_pair_does_not_poison_the_conversation():
    async def handler(name: str, arguments: dict[str, Any], task_id: str) -> str:
        return "bad \ud800 text"

    result = await HermesAgentLoop(ScriptedServer(calls(call()), says("done")), [tool()], tool_handler=handler).run(
        user()
    )
    result.messages[2]["content"].encode()


async def test_a_refusal_that_is_no_model_error_ends_one_rollout_only():
    broken = HermesAgentLoop(ScriptedServer(ZeroDivisionError("bug in a server")))
    fine = [HermesAgentLoop(ScriptedServer(says("ok"), latency_s=0.01)) for _ in range(20)]
    bad, *good = await asyncio.gather(*(loop.run(user()) for loop in [broken, *fine]))
    assert bad.outcome is Outcome.API_ERROR
    assert "bug in a server" in (bad.error or "")
    assert all(result.outcome is Outcome.FINISHED for result in good)


async def test_one_loop_object_runs_many_rollouts_that_do_not_mix():
    class Mirror(ScriptedServer):
        def next_step(self) -> Any:
            return lambda view: says(str(view[0]["content"]))

    loop = HermesAgentLoop(Mirror(latency_s=0.001))
    results = await asyncio.gather(*(loop.run(user(f"task {i}")) for i in range(50)))
    assert [result.messages[-1]["content"] for result in results] == [f"task {i}" for i in range(50)]


async def test_a_result_fills_a_rollout_record_that_reads_back():
    server = ScriptedServer(calls(call(), call("nope"), call(arguments="ls")), says("done"))
    result = await HermesAgentLoop(server, [tool()], tool_handler=echo).run(user())
    record = record_of(result)
    again = RolloutRecord.from_json(record.to_json())
    assert again.outcome == "finished"
    assert again.trainable
    assert [item["status"] for item in again.tool_calls] == ["ok", "unknown", "ok"]
    assert again.metrics == result.metrics


WRITTEN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(raw=WRITTEN, name=st.text(st.characters(), max_size=8))
async def test_nothing_a_model_writes_keeps_a_rollout_from_being_stored(raw, name):
    server = ScriptedServer(calls(call("terminal", raw), call(name, raw), call("any", {"x": raw})), says("done"))
    tools = [tool(), tool("any", required=(), y={"type": "string"})]
    result = await HermesAgentLoop(server, tools, tool_handler=echo).run(user())
    record = record_of(result)
    assert RolloutRecord.from_json(record.to_json()).tool_calls[0]["name"] == "terminal"


@pytest.mark.parametrize("levels", [300, 900, 5000])
async def test_bottomless_arguments_break_nothing(levels):
    deep: Any = {}
    for _ in range(levels):
        deep = {"x": deep}
    server = ScriptedServer(calls(call("any", deep), call("nope", deep)), says("done"))

    async def quiet(name: str, arguments: dict[str, Any], task_id: str) -> str:
        return "ok"

    result = await HermesAgentLoop(server, [tool("any", required=(), y={})], tool_handler=quiet).run(user())
    assert result.outcome is Outcome.FINISHED
    assert_paired(result.messages)
    record_of(result).to_json()


async def test_an_api_error_later_keeps_what_was_done():
    server = ScriptedServer(calls(call()), ModelRefused("400"))
    result = await HermesAgentLoop(server, [tool()], tool_handler=echo).run(user())
    assert result.outcome is Outcome.API_ERROR
    assert result.turns_used == 2
    assert len(result.turns) == 1
    assert result.tool_calls_executed_ok == 1


async def test_cancel_stops_the_command_and_returns_a_paired_result():
    started, stopped = asyncio.Event(), asyncio.Event()

    async def handler(name: str, arguments: dict[str, Any], task_id: str) -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return ""

    loop = HermesAgentLoop(ScriptedServer(calls(call(), call())), [tool()], tool_handler=handler)
    running = asyncio.create_task(loop.run(user()))
    await started.wait()
    loop.cancel()
    result = await running
    assert stopped.is_set()
    assert result.outcome is Outcome.CANCELLED
    assert not running.cancelled()
    assert [record.status for record in result.tool_calls] == [ToolStatus.CANCELLED, ToolStatus.SKIPPED]
    assert_paired(result.messages)


async def test_cancel_while_the_model_samples_returns_too():
    server = ScriptedServer(says("late"), latency_s=60)
    loop = HermesAgentLoop(server)
    running = asyncio.create_task(loop.run(user()))
    await eventually(lambda: server.conversations and server.conversations[0].prompts)
    loop.cancel()
    result = await running
    assert result.outcome is Outcome.CANCELLED
    assert result.turns_used == 1


async def test_cancelling_the_awaiting_task_stops_the_command_and_raises():
    started, stopped = asyncio.Event(), asyncio.Event()

    async def handler(name: str, arguments: dict[str, Any], task_id: str) -> str:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return ""

    messages = user()
    loop = HermesAgentLoop(ScriptedServer(calls(call())), [tool()], tool_handler=handler)
    running = asyncio.create_task(loop.run(messages))
    await started.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stopped.is_set()
    assert_paired(messages)


async def test_a_timeout_around_run_works_as_everywhere_in_asyncio():
    loop = HermesAgentLoop(ScriptedServer(says("late"), latency_s=60), limits=Limits(rollout_timeout_s=50))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await loop.run(user())


class WatchingRuntime(Runtime):
    """A runtime with one process whose end is told when `ended` is set."""

    def __init__(self) -> None:
        super().__init__(lambda name, arguments: ToolOutcome("started"))
        self.ended = asyncio.Event()
        self._told = False

    async def wait_for_notice(self) -> bool:
        if self._told:
            return False
        await self.ended.wait()
        return True

    def pending_notices(self) -> list[Message]:
        if not self.ended.is_set() or self._told:
            return []
        self._told = True
        return [{"role": "user", "content": "[process completed]"}]


async def test_a_model_that_answers_while_a_watched_process_runs_gets_another_turn_at_its_end():
    runtime = WatchingRuntime()

    def answer(view: Sequence[Message]) -> ModelTurn:
        asyncio.get_running_loop().call_soon(runtime.ended.set)
        return says("waiting for it")

    server = ScriptedServer(calls(call()), answer, says("it is done"))
    result = await HermesAgentLoop(server, runtime=runtime).run(user())
    assert result.outcome is Outcome.FINISHED
    assert [m["content"] for m in result.messages[-3:]] == ["waiting for it", "[process completed]", "it is done"]
    assert result.turns_used == 3


@pytest.mark.parametrize("limits", [Limits(tool_timeout_s=0.05), Limits(turn_timeout_s=0.05), Limits(max_turns=1)])
async def test_an_answer_stands_when_the_process_does_not_end_in_time_or_no_turn_is_left(limits):
    result = await HermesAgentLoop(ScriptedServer(says("done")), runtime=WatchingRuntime(), limits=limits).run(user())
    assert result.outcome is Outcome.FINISHED
    assert result.messages[-1]["content"] == "done"


async def test_the_record_says_which_messages_were_sampled_and_by_which_call():
    example = [*user("an example"), {"role": "assistant", "content": "as given"}]
    server = ScriptedServer(calls(call("echo")), says("done"))
    loop = HermesAgentLoop(server, [tool()], tool_handler=echo)
    record = record_of(await loop.run([*example, *user("go")]))
    assert [m["role"] for m in record.messages] == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    assert record.sampled_by == [None, None, None, 0, None, 1]
    assert [turn["message"] for turn in record.turns] == [3, 5]
    assert verify([record.to_json()]).ok


async def test_whoever_watches_is_told_each_turn_and_each_round_of_calls():
    told: list[str] = []
    server = ScriptedServer(calls(call(), call("nope")), says("done"))
    await HermesAgentLoop(server, [tool()], tool_handler=echo, on_activity=told.append).run(user())
    assert told == ["turn 1: the model samples", "turn 1: running terminal, nope", "turn 2: the model samples"]
