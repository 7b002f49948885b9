"""What rollouts are told follows from the config alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.config.settings import HermesAgentEnvConfig
from environments.rollouts.planning import Plan, content_id, item_field


def plan(trainer: int = -1, **config: object) -> Plan:
    return Plan(HermesAgentEnvConfig(**config), trainer)  # type: ignore[arg-type]


@given(
    length=st.integers(16, 200_000),
    turn=st.none() | st.integers(1, 4000),
    context=st.none() | st.integers(1, 300_000),
    trainer=st.just(-1) | st.integers(16, 200_000),
)
def test_no_sequence_outgrows_the_trainer(length: int, turn: int | None, context: int | None, trainer: int) -> None:
    """A prompt of the largest size plus one whole turn fits, unless one turn alone is larger than everything."""
    made = plan(trainer, max_token_length=length, max_tokens_per_turn=turn, max_context_tokens=context)
    settings = made.settings("e", "p")
    assert settings.context.max_tokens is not None
    if made.turn_tokens() < made.longest_sequence():
        longest = settings.context.max_tokens + made.turn_tokens()
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
    assert Plan(HermesAgentEnvConfig(max_token_length=asked), trainer, told).longest_sequence() == longest


def test_a_turn_may_take_a_quarter_unless_told_otherwise() -> None:
    assert plan(max_token_length=8192).turn_tokens() == 2048
    assert plan(max_token_length=8192, max_tokens_per_turn=100).turn_tokens() == 100


def test_seeds_follow_from_the_run_and_the_rollouts_name() -> None:
    one, other = plan(seed=1), plan(seed=2)
    assert one.seed("g/0") == plan(seed=1).seed("g/0")
    assert len({one.seed("g/0"), one.seed("g/1"), other.seed("g/0")}) == 3
    assert 0 <= one.seed("g/0") < 2**31


def test_the_system_prompt_goes_before_whatever_the_environment_says() -> None:
    told = plan(system_prompt="be brief")
    assert told.messages("task") == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "task"}]
    examples = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert told.messages(examples)[1:] == examples
    assert plan().messages("task") == [{"role": "user", "content": "task"}]


def test_the_earlier_names_reach_the_loop_and_the_tools() -> None:
    settings = plan(
        terminal_timeout=33.0,
        terminal_lifetime=99.0,
        max_agent_turns=7,
        default_result_size_chars=10,
        turn_budget_chars=20,
    ).settings("e", "p")
    assert settings.tools.default_timeout_s == 33
    assert settings.lease_ttl_s == 99.0
    assert settings.limits.max_turns == 7
    assert (settings.budget.per_result_chars, settings.budget.per_turn_chars) == (10, 20)


def test_items_may_be_mappings_or_objects() -> None:
    @dataclass
    class Item:
        id: str = "x"

    assert item_field(Item(), "id") == item_field({"id": "x"}, "id") == "x"
    assert item_field(Item(), "category") is None


def test_items_without_an_id_are_named_by_their_content() -> None:
    assert content_id({"a": 1, "b": 2}) == content_id({"b": 2, "a": 1})
    assert content_id({"a": 1}) != content_id({"a": 2})
