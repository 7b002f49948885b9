"""Reasoning, retries, messages and handler results: the small parts of the loop."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from agent_loop.model.chat import extract_reasoning
from agent_loop.model.contract import ModelRefused, ModelUnavailable
from agent_loop.model.errors import RetryPolicy, with_retries
from agent_loop.turn.messages import MALFORMED_NAME, CallIds, arguments_text, assistant_message, settle, tool_message
from agent_loop.turn.runtime import ToolOutcome, ToolStatus, as_outcome
from support.loop_servers import call, calls, says


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        ({"reasoning_content": "a", "reasoning": "b"}, "a"),
        ({"reasoning": "b", "reasoning_details": [{"text": "c"}]}, "b"),
        ({"reasoning_details": [{"type": "summary"}, {"text": "c"}, {"text": "d"}]}, "c"),
        (SimpleNamespace(reasoning_details=[SimpleNamespace(text="c")]), "c"),
        ({"content": "<think>\nhm\n</think>\nok"}, "hm"),
        ({"content": "hm</think>ok"}, "hm"),
        ({"content": "<think>never ends"}, "never ends"),
        ({"content": "[THINK]x[/THINK]y"}, "x"),
        ({"content": "<think></think>ok"}, None),
        ({"content": "plain"}, None),
        ({"content": None, "reasoning_content": ""}, None),
        (SimpleNamespace(), None),
    ],
)
def test_reasoning_is_found_in_the_known_order(message, reasoning):
    assert extract_reasoning(message) == reasoning


async def test_only_transport_faults_are_tried_again():
    tries: list[int] = []

    async def refuse() -> None:
        tries.append(1)
        raise ModelRefused("400")

    with pytest.raises(ModelRefused):
        await with_retries(refuse, RetryPolicy(base_s=0))
    assert len(tries) == 1


async def test_the_last_failure_is_raised_after_all_attempts():
    tries: list[int] = []

    async def fail() -> None:
        tries.append(1)
        raise ModelUnavailable(f"try {len(tries)}")

    with pytest.raises(ModelUnavailable, match="try 4"):
        await with_retries(fail, RetryPolicy(attempts=4, base_s=0))


def test_pauses_grow_to_the_cap_and_are_spread_by_jitter():
    policy = RetryPolicy(base_s=1, cap_s=5)
    assert [policy.pause_s(n, 1.0) for n in (1, 2, 3, 4, 100)] == [1, 2, 4, 5, 5]
    assert policy.pause_s(3, 0.25) == 1.0
    assert policy.pause_s(1, 0.0, asked_s=3.0) == 3.0
    assert policy.pause_s(1, 0.0, asked_s=600.0) == 5.0
    with pytest.raises(ValueError, match="attempts"):
        RetryPolicy(attempts=0)


def test_settling_twice_changes_nothing():
    turn = settle(calls(call(id="x"), call(id=None), call(id="x"), malformed=("half",)), CallIds())
    assert settle(turn, CallIds()) == turn
    assert turn.calls[0].id == "x"
    assert len({made.id for made in turn.calls}) == 4
    assert turn.calls[-1].name == MALFORMED_NAME
    assert turn.malformed == ()


def test_markup_that_stands_alone_becomes_a_call_with_an_error_so_that_a_result_can_answer_it():
    turn = settle(says("x", malformed=("half",)), CallIds())
    assert [(made.name, made.error) for made in turn.calls] == [(MALFORMED_NAME, "half")]


def test_an_assistant_message_keeps_reasoning_beside_the_content_but_not_twice():
    assert assistant_message(says("ok", reasoning="why"))["reasoning_content"] == "why"
    assert "reasoning_content" not in assistant_message(says("<think>why</think>ok", reasoning="why"))


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ('{"a":  1}', '{"a":  1}'),
        ({"a": 1}, '{"a": 1}'),
        (None, "{}"),
        ("ls", '{"unparsed_arguments": "ls"}'),
        ([1], '{"unparsed_arguments": [1]}'),
        ("[1]", '{"unparsed_arguments": "[1]"}'),
    ],
)
def test_arguments_in_the_history_are_always_a_json_object(raw, text):
    assert arguments_text(raw) == text


def test_arguments_that_json_cannot_hold_are_shown_as_text():
    assert isinstance(json.loads(arguments_text({"a": float("nan")})), dict)
    assert isinstance(json.loads(arguments_text(object())), dict)


def test_an_impossible_name_is_not_repeated_to_the_server():
    turn = settle(calls(call("rm -rf " * 1000)), CallIds())
    assert assistant_message(turn)["tool_calls"][0]["function"]["name"] == MALFORMED_NAME
    assert tool_message(turn.calls[0], "x")["name"] == MALFORMED_NAME


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
