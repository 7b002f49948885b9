"""One test for each fault of the earlier loop (W-L1 to W-L14): it does not come back."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

from agent_loop.context.window import ContextPolicy
from agent_loop.limits import Limits
from agent_loop.loop import HermesAgentLoop
from agent_loop.model.chat import ChatServer
from agent_loop.model.contract import ModelUnavailable
from agent_loop.model.errors import RetryPolicy
from agent_loop.outcome import Outcome
from agent_loop.records.record import AgentResult
from agent_loop.turn.tool_call import ToolStatus
from support.loop_servers import ScriptedServer, assert_paired, call, calls, echo, says, tool, user


async def run(*script: Any, **options: Any) -> AgentResult:
    options.setdefault("tool_handler", echo)
    options.setdefault("tool_schemas", [tool()])
    result = await HermesAgentLoop(ScriptedServer(*script), **options).run(user())
    assert_paired(result.messages)
    return result


async def test_w_l1_null_arguments_are_answered_and_never_reuse_an_earlier_result():
    first = await run(calls(call(arguments="null")), says("done"))
    assert first.tool_calls[0].status is ToolStatus.INVALID
    assert "null" in first.messages[2]["content"]
    later = await run(calls(call(), call(arguments=None), call(arguments="null")), says("done"))
    assert [record.status for record in later.tool_calls] == [ToolStatus.OK, ToolStatus.INVALID, ToolStatus.INVALID]
    assert later.messages[3]["content"] != later.messages[2]["content"]
    assert later.outcome is Outcome.FINISHED


async def test_w_l1_dict_arguments_of_an_unknown_tool_do_not_break_the_error():
    result = await run(calls(call("nope", {"a": "b" * 1000})), says("done"))
    assert result.tool_errors[0].arguments.startswith("{'a': 'bbb")
    assert len(result.tool_errors[0].arguments) == 200


async def test_w_l2_calls_without_an_id_get_one_that_their_result_shares():
    def answer(**options: Any) -> Any:
        return {"choices": [{"message": {"content": None, "tool_calls": made}, "finish_reason": "tool_calls"}]}

    made = [{"type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}] * 2
    sent: list[list[dict[str, Any]]] = []

    async def chat_completion(**options: Any) -> Any:
        sent.append(options["messages"])
        return answer() if len(sent) == 1 else {"choices": [{"message": {"content": "done"}, "finish_reason": "stop"}]}

    loop = HermesAgentLoop(SimpleNamespace(chat_completion=chat_completion), [tool()], tool_handler=echo)
    result = await loop.run(user())
    assert_paired(result.messages)
    assert_paired(sent[1])
    assert sent[1] == result.messages[: len(sent[1])]


async def test_w_l2_repeated_ids_are_made_unique():
    result = await run(calls(call(call_id="x"), call(call_id="x")), calls(call(call_id="x")), says("done"))
    assert len({record.call_id for record in result.tool_calls}) == 3


async def test_w_l3_a_turn_cut_off_by_length_is_not_a_natural_finish():
    result = await run(says("and then", finish_reason="length"))
    assert result.outcome is Outcome.LENGTH
    assert not result.finished_naturally
    with_call = await run(calls(call(), finish_reason="length"))
    assert with_call.outcome is Outcome.LENGTH
    assert with_call.tool_calls[0].status is ToolStatus.SKIPPED


async def test_w_l4_malformed_markup_is_answered_with_an_error_not_taken_for_the_end():
    result = await run(says('<tool_call>{"name": ', malformed=("The JSON ends too early.",)), says("done"))
    assert result.turns_used == 2
    assert "The JSON ends too early." in result.messages[2]["content"]
    assert result.tool_calls[0].status is ToolStatus.MALFORMED
    assert result.messages[2]["role"] == "tool"
    assert "The JSON ends too early." in result.tool_errors[0].error
    assert result.finished_naturally


async def test_w_l5_a_hung_tool_is_stopped_and_the_rollout_goes_on():
    stopped = asyncio.Event()

    async def hang(name: str, arguments: dict[str, Any], task_id: str) -> str:
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return ""

    result = await run(calls(call()), says("done"), tool_handler=hang, limits=Limits(tool_timeout_s=0.05))
    assert stopped.is_set()
    assert result.tool_calls[0].status is ToolStatus.TIMEOUT
    assert result.outcome is Outcome.FINISHED


async def test_w_l6_the_loop_starts_no_threads():
    before = threading.active_count()
    await run(calls(call(), call()), says("done"))
    assert threading.active_count() == before


async def test_w_l7_storing_a_long_result_does_not_stall_other_rollouts():
    storing, others_ran = asyncio.Event(), asyncio.Event()

    async def another_rollout() -> None:
        await storing.wait()
        others_ran.set()

    class Slow:
        def schemas(self) -> list[Any]:
            return [tool()]

        async def call(self, name: str, arguments: dict[str, Any], *, call_id: str) -> Any:
            raise AssertionError("the handler runs calls")

        def parallel_safe(self, name: str) -> bool:
            return False

        async def wait_for_notice(self) -> bool:
            return False

        def pending_notices(self) -> list[Any]:
            return []

        async def store_result(self, text: str) -> str:
            storing.set()
            await asyncio.wait_for(others_ran.wait(), 10)
            return "/results/1"

    async def big(name: str, arguments: dict[str, Any], task_id: str) -> str:
        return "x" * 200_000

    other = asyncio.create_task(another_rollout())
    result = await run(calls(call()), says("done"), tool_handler=big, runtime=Slow())
    await other
    assert result.tool_calls[0].stored_path == "/results/1"


async def test_w_l8_truncation_keeps_the_trajectory_and_orphans_nothing():
    async def big(name: str, arguments: dict[str, Any], task_id: str) -> str:
        return "x" * 4000

    script = [
        calls(call(arguments={"command": f"step {i}"}), call(arguments={"command": f"more {i}"})) for i in range(12)
    ]
    server = ScriptedServer(*script, says("done"))
    loop = HermesAgentLoop(server, [tool()], tool_handler=big, context=ContextPolicy(max_tokens=8000))
    result = await loop.run(user("the task"))
    assert result.outcome is Outcome.FINISHED
    assert result.truncations
    assert len(result.messages) == 1 + 12 * 3 + 1
    assert all(message["content"] == "x" * 4000 for message in result.messages if message["role"] == "tool")
    [conversation] = server.conversations
    assert conversation.restarts == len(result.truncations)
    for prompt in conversation.prompts:
        assert prompt[0]["content"] == "the task"
        assert prompt[-1]["role"] in ("user", "tool")


async def test_w_l9_sampled_content_is_kept_as_it_was():
    text = "<think>hm</think>I will <b>not</b> call <tool_call>"
    result = await run(says(text))
    assert result.messages[-1] == {"role": "assistant", "content": text}


async def test_w_l10_every_failure_is_counted_and_no_rate_exceeds_one():
    async def failing(name: str, arguments: dict[str, Any], task_id: str) -> str:
        return json.dumps({"error": "File not found: a.txt"})

    result = await run(calls(call(), call("nope"), call(arguments="{")), says("done"), tool_handler=failing)
    assert [record.status for record in result.tool_calls] == [ToolStatus.ERROR, ToolStatus.UNKNOWN, ToolStatus.INVALID]
    assert result.tool_calls_attempted == 3
    assert result.tool_calls_exec_error == 1
    assert len(result.tool_errors) == 3
    assert all(0 <= value <= 1 for name, value in result.metrics.items() if name.endswith("_rate"))


async def test_w_l11_only_tools_that_can_run_are_offered():
    offered: list[Any] = []

    class Recording(ScriptedServer):
        def open(self, messages: Any, tools: Any) -> Any:
            offered.extend(tools)
            return super().open(messages, tools)

    result = await HermesAgentLoop(
        Recording(calls(call("memory", {})), says("done")), [tool()], {"terminal"}, tool_handler=echo
    ).run(user())
    assert [item["function"]["name"] for item in offered] == ["terminal"]
    assert "Available tools: terminal" in result.messages[2]["content"]


async def test_w_l12_calls_of_safe_tools_run_beside_each_other():
    running = 0
    both = asyncio.Event()

    async def meet(name: str, arguments: dict[str, Any], task_id: str) -> str:
        nonlocal running
        running += 1
        if running == 2:
            both.set()
        await asyncio.wait_for(both.wait(), 10)
        return "met"

    result = await run(calls(call(), call()), says("done"), tool_handler=meet, parallel_tools={"terminal"})
    assert result.tool_calls_executed_ok == 2
    assert result.turns[0].parallel


async def test_w_l13_a_transient_error_is_tried_again():
    retry = RetryPolicy(attempts=3, base_s=0)
    result = await run(ModelUnavailable("503"), ModelUnavailable("reset"), says("done"), retry=retry)
    assert result.outcome is Outcome.FINISHED
    assert result.turns[0].retries == 2
    ended = await run(*[ModelUnavailable("503")] * 3, retry=retry)
    assert ended.outcome is Outcome.API_ERROR
    assert not ended.outcome.trainable


async def test_w_l14_a_repaired_call_is_never_counted_as_valid():
    result = await run(calls(call(arguments="ls -la")), says("done"))
    assert result.tool_calls_executed_ok == 1
    assert result.tool_calls_schema_valid == 0
    assert result.tool_calls[0].repairs == ("plain_string",)
    assert result.metrics["repair/plain_string"] == 1
    by_parser = await run(calls(call(repairs=("single_quotes",))), says("done"))
    assert by_parser.tool_calls_schema_valid == 0


async def test_without_tokens_the_result_says_so_instead_of_inventing_them():
    result = await run(says("done"))
    assert not result.has_tokens
    assert result.segments == []
    assert result.managed_state is None
    assert ChatServer(SimpleNamespace(chat_completion=echo)).open(user(), []).segments() == []
