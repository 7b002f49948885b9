"""What rollouts are told follows from the config alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent_loop.tools import ToolsetError
from environments.config.settings import HermesAgentEnvConfig
from environments.rollouts.planning import (
    choose_tools,
    content_id,
    first_messages,
    item_field,
    longest_sequence,
    plan_group,
    prompt_tokens,
    seed_of,
    turn_tokens,
)
from support.env_tasks import NumberEnv


def config(**given: object) -> HermesAgentEnvConfig:
    return HermesAgentEnvConfig(**given)  # type: ignore[arg-type]


@given(
    length=st.integers(16, 200_000),
    turn=st.none() | st.integers(1, 4000),
    context=st.none() | st.integers(1, 300_000),
    trainer=st.just(-1) | st.integers(16, 200_000),
)
def test_no_sequence_outgrows_the_trainer(length: int, turn: int | None, context: int | None, trainer: int) -> None:
    """A prompt of the largest size plus one whole turn fits, unless one turn alone is larger than everything."""
    assume(turn is None or turn < length)  # the config refuses a turn without room for a prompt
    made = config(max_token_length=length, max_tokens_per_turn=turn, max_context_tokens=context)
    allowed = longest_sequence(made, trainer)
    if turn_tokens(made, allowed) < allowed:
        longest = prompt_tokens(made, allowed) + turn_tokens(made, allowed)
        assert longest <= length
        assert trainer == -1 or longest < trainer


@pytest.mark.parametrize(
    ("asked", "told", "trainer", "longest"),
    [
        (None, None, -1, 32_768),
        (None, 40_960, -1, 40_959),
        (None, 40_960, 8193, 8192),
        (None, 1_000_000, -1, 131_072),
        (8192, 40_960, -1, 8192),
        (200_000, 40_960, -1, 200_000),
    ],
)
def test_the_longest_sequence_is_the_models_own_unless_told(
    asked: int | None, told: int | None, trainer: int, longest: int
) -> None:
    assert longest_sequence(HermesAgentEnvConfig(max_token_length=asked), trainer, told) == longest


def test_a_turn_may_take_a_quarter_unless_told_otherwise() -> None:
    assert turn_tokens(config(), 8192) == 2048
    assert turn_tokens(config(max_tokens_per_turn=100), 8192) == 100


def test_seeds_follow_from_the_run_and_the_rollouts_name() -> None:
    one, other = config(seed=1), config(seed=2)
    assert seed_of(one, "g/0") == seed_of(config(seed=1), "g/0")
    assert len({seed_of(one, "g/0"), seed_of(one, "g/1"), seed_of(other, "g/0")}) == 3
    assert 0 <= seed_of(one, "g/0") < 2**31


def test_the_system_prompt_goes_before_whatever_the_environment_says() -> None:
    told = config(system_prompt="be brief")
    assert first_messages(told, "task") == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "task"},
    ]
    examples = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert first_messages(told, examples)[1:] == examples
    assert first_messages(config(), "task") == [{"role": "user", "content": "task"}]


def test_the_names_of_hermes_agent_reach_the_loop_and_the_tools() -> None:
    env = NumberEnv(
        terminal_timeout=33.0,
        terminal_lifetime=99.0,
        max_agent_turns=7,
        default_result_size_chars=10,
        turn_budget_chars=20,
        preview_size_chars=5,
        tool_result_overrides={"terminal": None},
        max_token_length=8192,
        max_tokens_per_turn=100,
    )
    job = plan_group(env, {"id": "x", "number": 7}, "g", 0)
    assert job.tool_config.default_timeout_s == 33
    assert job.lease_ttl_s == 99.0
    assert job.limits.max_turns == 7
    assert (job.budget.per_result_chars, job.budget.per_turn_chars, job.budget.preview_chars) == (10, 20, 5)
    assert (job.budget.limit_for("terminal"), job.budget.limit_for("patch")) == (None, 10)
    assert (job.context.max_tokens, job.sampling.max_tokens) == (8092, 100)


def test_a_distribution_of_your_own_is_drawn_from() -> None:
    mine = config(distribution="mine", distributions={"mine": {"todo": 1.0}})
    assert choose_tools(mine, 0).toolsets == ("todo",)
    with pytest.raises(ToolsetError, match="unknown toolset 'tod'"):
        choose_tools(config(distribution="mine", distributions={"mine": {"tod": 1.0}}), 0)


async def test_an_environment_answers_what_a_rule_asks_and_hears_what_a_rollout_does() -> None:
    env = NumberEnv()
    job = plan_group(env, {"id": "x", "number": 7}, "g", 0)
    assert job.ask is not None
    assert await job.ask("terminal", "rm -r x", "deletes a tree") == "deny"
    assert job.always_allowed is env.always_allowed
    told: list[tuple[str, str]] = []
    replace(job, activity=lambda *what: told.append(what)).on_activity("turn 1")
    assert told == [("g", "turn 1")]


def test_limits_are_set_in_one_place_each() -> None:
    assert config(limits={"max_tool_calls": 3}).limits.rollout_timeout_s == config().limits.rollout_timeout_s == 1800
    assert config(limits={"rollout_timeout_s": None}).limits.rollout_timeout_s is None
    with pytest.raises(ValueError, match="set `max_agent_turns`"):
        config(limits={"max_turns": 3})
    with pytest.raises(ValueError, match="max_tool_cals"):
        config(limits={"max_tool_cals": 3})


def test_items_may_be_mappings_or_objects() -> None:
    @dataclass
    class Item:
        id: str = "x"

    assert item_field(Item(), "id") == item_field({"id": "x"}, "id") == "x"
    assert item_field(Item(), "category") is None


def test_items_without_an_id_are_named_by_their_content() -> None:
    assert content_id({"a": 1, "b": 2}) == content_id({"b": 2, "a": 1})
    assert content_id({"a": 1}) != content_id({"a": 2})
