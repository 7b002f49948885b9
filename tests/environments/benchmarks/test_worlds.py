"""Simulated worlds: tools that act on an object, rewards that play the recorded calls again, and their table."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from agent_loop.records.verify import verify
from agent_loop.tools.tool import ToolFailure
from environments.base import AgentResult, SandboxContext, ServerConfig
from environments.benchmarks.oracle_table import on_terminal, oracle_row, table
from environments.benchmarks.packages import folder_of, needed
from environments.benchmarks.worlds import WorldEnv
from environments.config.settings import UserConfig
from environments.errors import ConfigError
from environments.listed_items import Item, ListedItemsConfig
from environments.rollouts.trials import Script, Trials
from hermes_rl import RolloutRecord
from support.env_pool import DirectoryPool

NUMBER = {"type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}


class CounterEnv(WorldEnv):
    """Bring a counter to a number. Every item has the same prompt."""

    name = "counter"

    def __init__(self, pool: Any, policy: Any, **config: Any) -> None:
        settings = {"enabled_toolsets": [], "max_agent_turns": 8, "max_token_length": 8192} | config
        server = ServerConfig(server_type="standin", options={"policy": policy})
        super().__init__(ListedItemsConfig(**settings), [server], pool=pool)

    def load_items(self, config: Any) -> list[Item]:
        return [{"id": f"c{number}", "wanted": number, "user": "a customer"} for number in (2, 3, 10)]

    def format_prompt(self, item: Item) -> str:
        return "Bring the counter to the right number."

    def schemas(self, item: Item) -> Sequence[Mapping[str, Any]]:
        return [{"name": "add", "description": "Add.", "parameters": NUMBER}]

    def unlisted(self, item: Item) -> Sequence[Mapping[str, Any]]:
        return [{"name": "double", "description": "Double.", "parameters": {"type": "object", "properties": {}}}]

    def world(self, item: Item) -> Any:
        return {"value": 0}

    def act(self, world: Any, name: str, arguments: dict[str, Any]) -> Any:
        if name == "add" and arguments["amount"] < 0:
            raise ToolFailure("only upwards")
        world["value"] = world["value"] * 2 if name == "double" else world["value"] + arguments["amount"]
        return world["value"]

    def judge(self, item: Item, world: Any, result: AgentResult) -> float:
        return float(world["value"] == item["wanted"])

    def solution(self, item: Item) -> Sequence[Mapping[str, Any]]:
        half, rest = divmod(item["wanted"], 2)
        calls = [{"name": "add", "arguments": {"amount": -1}}, {"name": "add", "arguments": {"amount": half}}]
        last = {"calls": [{"name": "double"}, {"name": "add", "arguments": {"amount": rest}}]}
        return [*calls, last, {"content": "It is done."}]


@pytest.fixture
def pool() -> Iterator[DirectoryPool]:
    made = DirectoryPool()
    yield made
    made.close()


async def played(env: CounterEnv) -> list[RolloutRecord]:
    await env.open_up()
    try:
        return [
            record
            for number, item in enumerate(await env.chosen_evaluation_items())
            for record in (await env.rollouts.run_group(item, number, 1)).records()
        ]
    finally:
        await env.shut_down()


async def test_the_oracle_solves_every_item_and_a_no_op_none(pool: DirectoryPool) -> None:
    oracle, idle = await played(CounterEnv(pool, "oracle")), await played(CounterEnv(pool, "nop"))
    assert [record.score for record in oracle] == [1.0, 1.0, 1.0]
    assert [record.score for record in idle] == [0.0, 0.0, 0.0]
    assert verify(record.to_json() for record in oracle).ok
    assert [call["status"] for call in oracle[0].tool_calls] == ["error", "ok", "ok", "ok"]
    assert oracle[0].messages[-1]["content"] == "It is done."


async def test_the_reward_follows_from_the_record_alone(pool: DirectoryPool) -> None:
    env = CounterEnv(pool, "oracle")
    for item, record in zip(env.items, await played(env), strict=True):
        assert await env.compute_reward(item, AgentResult.from_record(record), None) == 1.0  # type: ignore[arg-type]
        undone = replace(record, tool_calls=record.tool_calls[:-1])
        expected = float(item["wanted"] % 2 == 0)  # without the last call an odd number is missed
        assert await env.compute_reward(item, AgentResult.from_record(undone), None) == expected  # type: ignore[arg-type]


async def test_an_unlisted_tool_can_be_called_and_is_told_to_nobody(pool: DirectoryPool) -> None:
    from agent_loop.local_models.standin.policies import call

    def guess(request: Any) -> str:
        return [call("triple", {}), call("double", {}), "Done."][min(request.results, 2)]

    record = (await played(CounterEnv(pool, guess)))[0]
    assert [schema["function"]["name"] for schema in record.tools] == ["add"]
    assert [made["status"] for made in record.tool_calls] == ["unknown", "ok"]
    assert "double" not in str(record.tool_calls[0]["error"])


async def test_validate_plays_solutions_that_are_calls(pool: DirectoryPool) -> None:
    env = CounterEnv(pool, "oracle")
    trials, item = Trials(env, "trial"), env.items[2]
    async with trials.prepared(item) as start:
        async with trials.attempted(item, start, Script(env.solution(item))) as attempt:
            assert (await trials.verified(item, attempt.result, attempt.frozen, scope=attempt.scope)).score == 1.0
            assert attempt.failed == "add: only upwards"
            assert attempt.scope.state["world"] == {"value": 10}
            assert attempt.result.final_answer == "It is done."
        async with trials.attempted(item, start, Script()) as attempt:
            assert (await trials.verified(item, attempt.result, attempt.frozen, scope=attempt.scope)).score == 0.0


class GreetedEnv(CounterEnv):
    """The prompt holds no word of the user."""

    def format_prompt(self, item: Item) -> Any:
        return [{"role": "system", "content": "You count."}]

    async def user_reply(self, item: Item, messages: Sequence[Mapping[str, Any]], ctx: SandboxContext) -> str | None:
        return "Bring it to the right number." if messages[-1]["role"] == "system" else None


async def test_the_user_speaks_first_where_the_prompt_has_no_word_of_theirs(pool: DirectoryPool) -> None:
    records = await played(GreetedEnv(pool, "oracle"))
    assert [record.score for record in records] == [1.0, 1.0, 1.0]
    assert records[0].messages[1] == {"role": "user", "content": "Bring it to the right number."}
    assert records[0].sampled_by[:2] == [None, None]
    assert verify(record.to_json() for record in records).ok


async def test_a_user_who_is_away_at_the_greeting_loses_the_rollout(pool: DirectoryPool) -> None:
    def away(request: Any) -> str:
        from agent_loop.local_models.standin import Fault

        raise Fault(503)

    user = UserConfig(server_type="standin", options={"policy": away}, tries=1)

    class Away(GreetedEnv):
        user_reply = CounterEnv.user_reply

    record = (await played(Away(pool, "oracle", user=user, rollout_tries=1)))[0]
    assert (record.outcome, record.trainable, record.score) == ("api_error", False, None)
    assert "the user is away" in str(record.error)


def record(item: str, score: float | None, seconds: float = 2.0) -> RolloutRecord:
    return RolloutRecord(
        rollout_id=f"{item}/0",
        group_id=item,
        environment="x",
        item_id=item,
        category="",
        policy="p",
        seed=0,
        outcome="finished",
        trainable=True,
        messages=[],
        verifier_score=score,
        timing={"total_s": seconds},
    )


def test_the_table_names_what_the_oracle_fails_and_what_a_no_op_passes() -> None:
    row = oracle_row("b", [record("a", 1.0, 1.0), record("b", 0.5, 3.0)], [record("a", 1.0), record("b", 0.0)])
    assert (row.items, row.oracle, row.no_op, row.seconds) == (2, 0.75, 0.5, 2.0)
    assert table([row]).splitlines()[-1] == "| b | 2 | 0.7500 | 0.5000 | 2.00 | b | a |"
    with pytest.raises(ValueError, match="not the same"):
        oracle_row("b", [record("a", 1.0)], [record("b", 0.0)])
    with pytest.raises(ValueError, match="no score"):
        oracle_row("b", [record("a", None)], [record("a", 0.0)])


def test_the_table_fits_a_terminal() -> None:
    tasks = [f"banking/user_task_{number}" for number in range(9)]
    row = oracle_row("agentdojo", [record(task, 1.0, 1.0) for task in tasks], [record(task, 1.0) for task in tasks])
    console = Console(width=80, file=io.StringIO())
    with console.capture() as captured:
        console.print(on_terminal([row]))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert all(task in " ".join(lines) for task in tasks)


def test_a_package_that_is_missing_is_named_with_what_to_install() -> None:
    with pytest.raises(ConfigError, match="needs the package nosuchthing: pip install it"):
        needed("nosuchthing.inner", "pip install it")
    with pytest.raises(ConfigError, match="needs the package nosuchthing: pip install it"):
        folder_of("nosuchthing", "pip install it")
    assert folder_of("environments", "").name == "environments"
