"""Limits: each ends the rollout with its own outcome, in the written order, with calls and results paired."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_loop.limits import Limits
from agent_loop.loop import HermesAgentLoop
from agent_loop.model.contract import Sampling
from agent_loop.outcome import Outcome
from agent_loop.records.record import AgentResult
from agent_loop.turn.calls import earliest
from agent_loop.turn.tool_call import ToolStatus
from support.loop_servers import ScriptedServer, assert_paired, call, calls, echo, says, tool, user


async def run(server: ScriptedServer, handler: Any = echo, **options: Any) -> AgentResult:
    result = await HermesAgentLoop(server, [tool()], {"terminal"}, tool_handler=handler, **options).run(user())
    assert_paired(result.messages)
    return result


async def slow(name: str, arguments: dict[str, Any], task_id: str) -> str:
    await asyncio.sleep(30)
    return "never"


async def test_max_turns():
    result = await run(ScriptedServer(calls(call()), repeat=True), max_turns=3)
    assert result.outcome is Outcome.MAX_TURNS
    assert result.turns_used == 3
    assert result.tool_calls_executed_ok == 3
    assert not result.finished_naturally
    assert result.messages[-1]["role"] == "tool"


async def test_an_answer_on_the_last_turn_is_a_finish_not_max_turns():
    assert (await run(ScriptedServer(calls(call()), says("done")), max_turns=2)).outcome is Outcome.FINISHED


async def test_malformed_turns_count_as_turns():
    result = await run(ScriptedServer(says("<tool_call>", malformed=("bad",)), repeat=True), max_turns=4)
    assert result.outcome is Outcome.MAX_TURNS
    assert result.metrics["tool_calls_malformed"] == 4


async def test_max_tool_calls_runs_what_is_allowed_and_answers_the_rest():
    result = await run(ScriptedServer(calls(call(), call(), call())), limits=Limits(max_tool_calls=2))
    assert result.outcome is Outcome.MAX_TOOL_CALLS
    assert [record.status for record in result.tool_calls] == [ToolStatus.OK, ToolStatus.OK, ToolStatus.SKIPPED]
    assert "limit of 2" in result.messages[-1]["content"]


async def test_exactly_max_tool_calls_may_still_finish():
    result = await run(ScriptedServer(calls(call(), call()), says("done")), limits=Limits(max_tool_calls=2))
    assert result.outcome is Outcome.FINISHED


async def test_calls_that_never_ran_do_not_use_up_the_tool_calls():
    script = ScriptedServer(calls(call("nope"), call(arguments="{")), calls(call()), says("done"))
    assert (await run(script, limits=Limits(max_tool_calls=1))).outcome is Outcome.FINISHED


async def test_the_sampled_token_budget_caps_each_request_and_ends_the_rollout():
    server = ScriptedServer(calls(call(), sampled_tokens=60), calls(call(), sampled_tokens=40))
    limits = Limits(max_sampled_tokens=100)
    result = await run(server, limits=limits, sampling=Sampling(max_tokens=80))
    assert [sampling.max_tokens for sampling in server.conversations[0].samplings] == [80, 40]
    assert result.outcome is Outcome.MAX_SAMPLED_TOKENS
    assert result.outcome.trainable


async def test_a_cut_made_by_the_budget_is_not_blamed_on_the_turn():
    server = ScriptedServer(says("and so", finish_reason="length", sampled_tokens=50))
    assert (await run(server, limits=Limits(max_sampled_tokens=50))).outcome is Outcome.MAX_SAMPLED_TOKENS
    server = ScriptedServer(says("and so", finish_reason="length", sampled_tokens=20))
    assert (await run(server, limits=Limits(max_sampled_tokens=50))).outcome is Outcome.LENGTH


async def test_the_budget_holds_where_the_server_counts_nothing():
    server = ScriptedServer(calls(call(), content="x" * 400), repeat=True)
    result = await run(server, limits=Limits(max_sampled_tokens=250))
    assert result.outcome is Outcome.MAX_SAMPLED_TOKENS
    assert result.turns_used == 3


async def test_the_rollout_deadline_stops_sampling():
    result = await run(ScriptedServer(says("late"), latency_s=30), limits=Limits(rollout_timeout_s=0.05))
    assert result.outcome is Outcome.DEADLINE
    assert not result.outcome.trainable
    assert "deadline" in (result.error or "")
    assert result.turns == []


async def test_the_rollout_deadline_stops_tools_and_answers_all_calls():
    server = ScriptedServer(calls(call(), call()))
    result = await run(server, slow, limits=Limits(rollout_timeout_s=0.05))
    assert result.outcome is Outcome.DEADLINE
    assert [record.status for record in result.tool_calls] == [ToolStatus.TIMEOUT, ToolStatus.SKIPPED]


async def test_the_turn_deadline_stops_tools_and_the_rollout_goes_on():
    server = ScriptedServer(calls(call()), says("done"))
    result = await run(server, slow, limits=Limits(turn_timeout_s=0.05))
    assert result.tool_calls[0].status is ToolStatus.TIMEOUT
    assert result.outcome is Outcome.FINISHED


async def test_the_turn_deadline_ends_the_rollout_while_the_model_samples():
    server = ScriptedServer(says("late"), latency_s=30)
    assert (await run(server, limits=Limits(turn_timeout_s=0.05))).outcome is Outcome.DEADLINE


async def test_a_lone_timeout_error_of_a_server_is_not_our_deadline():
    server = ScriptedServer(TimeoutError("read timed out"), says("done"))
    result = await run(server, limits=Limits(rollout_timeout_s=60))
    assert result.outcome is Outcome.FINISHED
    assert result.turns[0].retries == 1


async def test_an_aborted_turn_is_infrastructure():
    result = await run(ScriptedServer(calls(call(), finish_reason="abort")))
    assert result.outcome is Outcome.API_ERROR
    assert result.tool_calls[0].status is ToolStatus.SKIPPED


async def test_a_conversation_that_cannot_fit_ends_as_context_overflow():
    server = ScriptedServer(says("x"))
    loop = HermesAgentLoop(server, [tool()], tool_handler=echo, max_context_tokens=100)
    result = await loop.run(user("x" * 4000))
    assert result.outcome is Outcome.CONTEXT_OVERFLOW
    assert server.conversations[0].prompts == []
    assert "100 are allowed" in (result.error or "")


async def test_the_deadline_is_checked_before_max_turns():
    async def brief(name: str, arguments: dict[str, Any], task_id: str) -> str:
        await asyncio.sleep(0.06)
        return "ok"

    limits = Limits(max_turns=1, rollout_timeout_s=0.05)
    assert (await run(ScriptedServer(calls(call())), brief, limits=limits)).outcome is Outcome.DEADLINE


async def test_length_is_checked_before_calls_are_run():
    server = ScriptedServer(calls(call(), call(), finish_reason="length"))
    result = await run(server, limits=Limits(max_tool_calls=1))
    assert result.outcome is Outcome.LENGTH
    assert result.tool_calls_executed_ok == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_turns": 0},
        {"max_tool_calls": -1},
        {"tool_timeout_s": 0},
        {"rollout_timeout_s": -1},
        {"max_parallel_calls": 0},
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Limits(**wrong)


def test_the_earliest_deadline_counts():
    assert earliest(None, 3.0, 1.0) == 1.0
    assert earliest(None, None) is None


@pytest.mark.parametrize("outcome", list(Outcome))
def test_infrastructure_is_untrainable_and_policy_is_trainable(outcome):
    befell = {"deadline", "api_error", "sandbox_lost", "cancelled"}
    assert outcome.trainable == (outcome.value not in befell)
