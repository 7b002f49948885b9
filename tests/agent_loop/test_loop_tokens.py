"""The loop over the token recorder and the stand-in policy: whatever happens, the training data is what was sampled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from agent_loop.context.window import ContextPolicy
from agent_loop.limits import Limits
from agent_loop.local_models.standin import Policy, StandIn, named_policy
from agent_loop.local_models.standin.policies import failing, wild
from agent_loop.loop import HermesAgentLoop
from agent_loop.model.backends import connect
from agent_loop.model.errors import RetryPolicy
from agent_loop.model.recorder import Recorder
from agent_loop.model.tokens.probe import probe_template
from agent_loop.outcome import Outcome
from agent_loop.records.record import AgentResult
from agent_loop.records.verify import verify
from support.loop_servers import assert_paired, record_of, tool, user
from tool_parsers import get_parser

FAST = RetryPolicy(attempts=4, base_s=0.001)


@asynccontextmanager
async def recorder(policy: Policy, **options: Any) -> AsyncIterator[tuple[Recorder, StandIn]]:
    async with StandIn(policy, **options) as standin:
        backend = await connect(standin.url)
        server = Recorder(backend, probe_template(standin.tokenizer), get_parser("hermes"))
        try:
            yield server, standin
        finally:
            await server.close()


async def handler(name: str, arguments: dict[str, Any], task_id: str) -> str:
    await asyncio.sleep(0)
    rng = Random(json.dumps(arguments, sort_keys=True))
    if rng.random() < 0.1:
        raise OSError("disk on fire")
    return json.dumps({"output": "line of output\n" * rng.randint(0, 60), "exit_code": 0})


def line(result: AgentResult, number: int = 0) -> bytes:
    return record_of(result, f"r{number}", tools=[tool()]).to_json()


@pytest.mark.parametrize("name", ["good", "sloppy", "malformed", "looping", "failing"])
async def test_every_policy_leaves_data_that_verify_accepts(name):
    async with recorder(named_policy(name)) as (server, _):
        loop = HermesAgentLoop(server, [tool()], tool_handler=handler, max_turns=6, retry=FAST)
        result = await loop.run(user("count the lines"))
    assert_paired(result.messages)
    assert result.has_tokens
    report = verify([line(result)])
    assert report.ok, str(report.violations[:1])
    assert result.outcome is (Outcome.MAX_TURNS if name == "looping" else Outcome.FINISHED)
    assert result.metrics["sampled_tokens"] == sum(mask != -100 for s in result.segments for mask in s.masks)


async def test_random_rollouts_with_truncation_errors_and_parallel_calls_are_token_exact():
    async with recorder(failing(wild, every=7)) as (server, standin):

        async def one(number: int) -> AgentResult:
            loop = HermesAgentLoop(
                server,
                [tool()],
                tool_handler=handler,
                parallel_tools={"terminal"} if number % 2 else (),
                retry=FAST,
                context=ContextPolicy(max_tokens=1500 + 100 * (number % 5), low_water=0.6),
                limits=Limits(max_turns=12, max_tool_calls=20),
            )
            return await loop.run(user(f"task {number}: look at the files"))

        results = await asyncio.gather(*(one(number) for number in range(60)))
        answered = sorted(tuple(e.prompt_ids + e.sampled_ids) for e in standin.log if e.status == 200)
    for result in results:
        assert_paired(result.messages)
    report = verify([line(result, number) for number, result in enumerate(results)])
    assert report.ok, str(report.violations[:1])
    recorded = sorted(tuple(c.prompt_ids + c.sampled_ids) for result in results for c in result.sampled_calls)
    assert recorded == answered, "the recorded calls are exactly those the server answered"
    assert any(result.truncations for result in results)
    assert any(len(result.segments) > 1 for result in results)
    assert sum(result.metrics["model_retries"] for result in results) > 0
    assert {Outcome.FINISHED} < {result.outcome for result in results}


async def test_a_truncated_prompt_fits_by_the_tokenizers_own_count():
    async with recorder(named_policy("looping")) as (server, standin):
        policy = ContextPolicy(max_tokens=1200)
        loop = HermesAgentLoop(server, [tool()], tool_handler=handler, context=policy, max_turns=25)
        result = await loop.run(user())
        assert result.outcome is Outcome.MAX_TURNS
        assert max(len(exchange.prompt_ids) for exchange in standin.log) <= 1200
    assert len(result.segments) == len(result.truncations) + 1
    assert len(result.truncations) < 12


async def test_a_server_with_a_smaller_context_than_thought_is_met_by_shortening():
    async with recorder(named_policy("looping"), context_tokens=900) as (server, _):
        loop = HermesAgentLoop(
            server, [tool()], tool_handler=handler, max_context_tokens=5000, max_turns=12, retry=FAST
        )
        result = await loop.run(user())
    assert result.outcome in (Outcome.MAX_TURNS, Outcome.LENGTH)
    assert result.truncations
    report = verify([line(result)])
    assert report.ok, str(report.violations[:1])
