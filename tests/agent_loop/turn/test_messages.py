"""Turns as messages: unique ids, arguments that are always JSON objects, names that servers accept."""

from __future__ import annotations

import json

import pytest

from agent_loop.turn.messages import CallIds, arguments_text, assistant_message, settle, tool_message
from agent_loop.turn.tool_call import MALFORMED_NAME, ToolOutcome, parsed_calls
from support.loop_servers import call, calls, says
from tool_parsers import Malformed, Parsed


def test_every_call_gets_an_id_of_its_own_and_keeps_a_usable_one():
    given = calls(call(call_id="x"), call(), call(call_id="x"), malformed=("half",))
    turn = settle(given, CallIds())
    assert settle(turn, CallIds()) == turn
    assert turn.calls[0].call_id == "x"
    assert len({made.call_id for made in turn.calls}) == 4
    assert turn.calls[-1].name == MALFORMED_NAME


def test_the_loop_works_on_calls_of_its_own_so_that_a_server_may_give_the_same_turn_again():
    given = calls(call())
    settle(given, CallIds()).calls[0].finish(ToolOutcome("done"))
    assert given == calls(call())


def test_markup_that_stands_alone_becomes_a_call_with_an_error_so_that_a_result_can_answer_it():
    found = parsed_calls(Parsed(errors=(Malformed("half", "<tool_call>", (0, 11)),)))
    assert [(made.name, made.error) for made in found] == [(MALFORMED_NAME, "half")]


def test_an_assistant_message_keeps_reasoning_apart_from_the_content_and_not_twice():
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
    assert tool_message(turn.calls[0])["name"] == MALFORMED_NAME
