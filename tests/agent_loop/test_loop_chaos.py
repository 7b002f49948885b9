"""Whatever model, tools and callers do at random: a typed outcome, paired messages, right sums, nothing left over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_loop.context.result_budget import ResultBudget
from agent_loop.context.strategies import Goal, View, estimate
from agent_loop.context.window import ContextPolicy
from agent_loop.limits import Limits
from agent_loop.loop import HermesAgentLoop
from agent_loop.model.chat import ChatServer
from agent_loop.model.contract import ContextTooLong, ModelError, ModelRefused, ModelTurn, ModelUnavailable
from agent_loop.model.errors import RetryPolicy
from agent_loop.outcome import Outcome
from agent_loop.records.record import AgentResult
from agent_loop.turn.tool_call import ToolCallRecord, ToolOutcome, ToolStatus
from sandbox_pool.errors import SandboxFileError, SandboxLost
from support.loop_servers import ScriptedServer, assert_paired, call, calls, record_of, says, tool, user

TOOLS = [tool(), tool("look", required=(), path={"type": "string"}), tool("wait", required=(), n={"type": "integer"})]
NAMES = ("terminal", "look", "wait", "nope", "")
RAW = (
    None,
    "",
    "ls",
    "{",
    "null",
    {"command": "ls"},
    '{"command": "ls"}',
    {"n": "3"},
    {"path": "a"},
    [],
    7,
    {"input": "x"},
)
ERRORS = (ModelUnavailable("503"), ModelRefused("400"), ContextTooLong("too long"), ValueError("bug"), OSError("reset"))


def random_turn(rng: Random) -> ModelTurn | Exception:
    """A turn, or what a server raises instead of one."""
    kind = rng.random()
    if kind < 0.12:
        return rng.choice(ERRORS)
    if kind < 0.2:
        return says("x" * rng.randint(0, 200), finish_reason=rng.choice(("stop", "length", "abort")))
    made = [
        call(
            rng.choice(NAMES), rng.choice(RAW), error=rng.choice((None, None, None, "No closing tag.")), call_id="same"
        )
        for _ in range(rng.randint(0, 4))
    ]
    malformed = ("Half a call.",) * (rng.random() < 0.2)
    return calls(*made, content="y" * rng.randint(0, 50), malformed=malformed, sampled_tokens=rng.randint(1, 50))


class RandomTools:
    """Tools that work, fail, hang, lose the sandbox, call other tools and send notices, all by their seed."""

    def __init__(self, seed: str) -> None:
        self._rng = Random(seed)

    def schemas(self) -> Sequence[Any]:
        return TOOLS

    async def call(self, name: str, arguments: dict[str, Any], *, call_id: str) -> ToolOutcome:
        kind = self._rng.random()
        await asyncio.sleep(0)
        if kind < 0.05:
            raise SandboxLost("host died")
        if kind < 0.15:
            raise self._rng.choice([KeyError("k"), SandboxFileError(2, "missing", "a"), TimeoutError()])
        if kind < 0.2:
            await asyncio.sleep(60)
        nested = (ToolCallRecord("look", {}, status=ToolStatus.OK),) * (kind > 0.9)
        return ToolOutcome(json.dumps({"output": "z" * self._rng.randint(0, 3000)}), nested=nested)

    def parallel_safe(self, name: str) -> bool:
        return name == "look"

    async def wait_for_notice(self) -> bool:
        return False

    def pending_notices(self) -> list[Any]:
        return [{"role": "user", "content": "[process finished]"}] if self._rng.random() < 0.1 else []

    async def store_result(self, text: str) -> str | None:
        if self._rng.random() < 0.3:
            raise SandboxLost("gone")
        return "/results/1"


def random_loop(seed: int) -> HermesAgentLoop:
    """A loop whose model, tools and limits all follow from the seed."""
    rng = Random(seed)
    server = ScriptedServer(*(random_turn(rng) for _ in range(30)), says("done"), repeat=True)
    return HermesAgentLoop(
        server,
        runtime=RandomTools(f"tools {seed}"),
        limits=Limits(
            max_turns=rng.randint(1, 12),
            max_tool_calls=rng.choice((None, 3, 10)),
            max_sampled_tokens=rng.choice((None, 100)),
            tool_timeout_s=0.01,
        ),
        retry=RetryPolicy(attempts=2, base_s=0.0),
        context=ContextPolicy(max_tokens=rng.choice((None, 500, 3000))),
        budget_config=ResultBudget(per_result_chars=1500, per_turn_chars=3000, preview_chars=500),
    )


def check(result: AgentResult) -> None:
    """What holds for every rollout."""
    assert_paired(result.messages)
    metrics = result.metrics
    parts = ("executed_ok", "exec_error", "invalid", "unknown", "malformed", "skipped", "cancelled", "lost")
    assert metrics["tool_calls_attempted"] == sum(metrics[f"tool_calls_{part}"] for part in parts)
    assert metrics["tool_calls_attempted"] == sum(len(m.get("tool_calls", ())) for m in result.messages)
    assert len(result.turns) == sum(m["role"] == "assistant" for m in result.messages)
    assert result.turns_used - len(result.turns) in (0, 1)
    assert result.finished_naturally == (result.outcome is Outcome.FINISHED)
    assert (result.outcome is Outcome.SANDBOX_LOST) == (metrics["tool_calls_lost"] > 0)
    assert result.outcome.trainable or result.error
    for message in result.messages:
        if message["role"] == "tool":
            json.loads(message["content"])
            assert len(message["content"]) <= 1500
    record_of(result).to_json()


@given(seed=st.integers(0, 10**9))
@settings(max_examples=60)
async def test_every_rollout_ends_with_an_outcome_and_holds_together(seed):
    result = await random_loop(seed).run(user("the task"))
    check(result)
    assert len(asyncio.all_tasks()) == 1, "no task is left behind"


async def test_a_rollout_is_the_same_alone_and_in_a_crowd():
    def story(result: AgentResult) -> Any:
        roles = [(m["role"], m["content"]) for m in result.messages if m["role"] != "tool"]
        return result.outcome, roles, [(record.name, record.repairs) for record in result.tool_calls]

    alone = [story(await random_loop(seed).run(user())) for seed in range(20)]
    crowd = await asyncio.gather(*(random_loop(seed).run(user()) for seed in range(300)))
    for result in crowd:
        check(result)
    assert [story(result) for result in crowd[:20]] == alone
    assert len({result.outcome for result in crowd}) >= 5


@given(seed=st.integers(0, 10**6), steps=st.integers(0, 60), graceful=st.booleans())
@settings(max_examples=60)
async def test_cancelled_anywhere_the_trajectory_is_paired_and_nothing_runs_on(seed, steps, graceful):
    messages = user()
    loop = random_loop(seed)
    running = asyncio.create_task(loop.run(messages))
    for _ in range(steps):
        await asyncio.sleep(0)
    if graceful:
        loop.cancel()
        # A task that has not run its first step yet cannot know the loop's request; it runs to its own end.
        result = await running
        check(result) if result.outcome is not Outcome.CANCELLED else assert_paired(result.messages)
    else:
        running.cancel()
        await asyncio.wait({running})
        if not running.cancelled():
            check(running.result())
    assert_paired(messages)
    assert len(asyncio.all_tasks()) == 1


@given(seed=st.integers(0, 10**6), limit=st.integers(400, 3000))
@settings(max_examples=40)
async def test_every_prompt_a_chat_server_gets_is_paired_and_fits(seed, limit):
    rng = Random(seed)
    prompts: list[list[dict[str, Any]]] = []

    class Server:
        async def chat_completion(self, **options: Any) -> Any:
            prompts.append(options["messages"])
            if len(prompts) > 12:
                return {"choices": [{"message": {"content": "done"}, "finish_reason": "stop"}]}
            made = [
                {"id": rng.choice(["", "a"]), "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}
                for _ in range(rng.randint(1, 3))
            ]
            return {"choices": [{"message": {"content": "", "tool_calls": made}, "finish_reason": "tool_calls"}]}

    async def handler(name: str, arguments: dict[str, Any], task_id: str) -> str:
        return json.dumps({"output": "x" * rng.randint(0, 4000)})

    loop = HermesAgentLoop(ChatServer(Server()), [tool()], tool_handler=handler, max_context_tokens=limit, max_turns=20)
    result = await loop.run(user("the task"))
    assert result.outcome in (Outcome.FINISHED, Outcome.CONTEXT_OVERFLOW)
    for prompt in prompts:
        assert_paired(prompt)
        assert prompt[0]["content"] == "the task"
        assert sum(map(estimate, prompt)) <= limit


async def test_a_strategy_of_ones_own_can_be_plugged_in():
    seen: list[Goal] = []

    class KeepTwo:
        async def apply(self, view: View, goal: Goal) -> View:
            seen.append(goal)
            return view.with_units(view.units[-2:])

    async def handler(name: str, arguments: dict[str, Any], task_id: str) -> str:
        return "x" * 2000

    server = ScriptedServer(*[calls(call(arguments={"command": str(n)})) for n in range(8)], says("done"))
    loop = HermesAgentLoop(
        server, [tool()], tool_handler=handler, max_context_tokens=2000, context_strategies=[KeepTwo()]
    )
    result = await loop.run(user())
    assert result.outcome is Outcome.FINISHED
    assert seen[0] == Goal(2000, 1400)
    assert result.truncations[0]["dropped_messages"] > 0
    assert all(len(prompt) <= 1 + 2 * 4 for prompt in server.conversations[0].prompts)


@pytest.mark.parametrize("error", ERRORS)
async def test_every_kind_of_server_error_is_an_outcome(error):
    loop = HermesAgentLoop(ScriptedServer(error, error, error), retry=RetryPolicy(attempts=2, base_s=0.0))
    result = await loop.run(user())
    expected = Outcome.CONTEXT_OVERFLOW if isinstance(error, ContextTooLong) else Outcome.API_ERROR
    assert result.outcome is expected
    assert isinstance(error, ModelError) or type(error).__name__ in (result.error or "")
