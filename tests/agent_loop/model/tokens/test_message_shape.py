"""Messages are brought into a template's shape without changing what they say."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.model.tokens.message_shape import MessageShape, as_mapping, shape_messages, short_id


def assistant(*calls, **more):
    tool_calls = [{"id": i, "type": "function", "function": {"name": "t", "arguments": a}} for i, a in calls]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls, **more}


def arguments_of(message):
    return [c["function"]["arguments"] for c in message["tool_calls"]]


def test_json_text_becomes_a_mapping_and_a_mapping_becomes_json_text():
    turn = assistant(("a", '{"x": 1}'), ("b", {"y": "é"}))
    (as_dict,) = shape_messages([turn], MessageShape(arguments="dict"))
    (as_text,) = shape_messages([turn], MessageShape(arguments="string"))
    assert arguments_of(as_dict) == [{"x": 1}, {"y": "é"}]
    assert [json.loads(a) for a in arguments_of(as_text)] == [{"x": 1}, {"y": "é"}]


@pytest.mark.parametrize(
    ("given", "shown"),
    [(None, {}), ("not json", {"arguments": "not json"}), ("[1]", {"arguments": "[1]"}), (3, {"arguments": 3})],
)
def test_arguments_that_are_no_object_are_shown_as_they_were_written(given, shown):
    assert as_mapping(given) == shown


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_goes_under_the_key_that_the_template_reads(key):
    turn = {"role": "assistant", "content": "x", key: "hm"}
    (shaped,) = shape_messages([turn], MessageShape(reasoning_key="thinking"))
    assert shaped == {"role": "assistant", "content": "x", "thinking": "hm"}


def test_thinking_is_left_out_where_the_template_writes_none():
    turn = {"role": "assistant", "content": "x", "reasoning": "hm"}
    assert shape_messages([turn], MessageShape(reasoning_key="")) == [{"role": "assistant", "content": "x"}]


def test_several_calls_become_one_turn_each_followed_by_its_own_result():
    results = [{"role": "tool", "tool_call_id": i, "content": i} for i in ("b", "a")]
    turn = assistant(("a", {}), ("b", {}), reasoning_content="hm")
    shaped = shape_messages([turn, *results, {"role": "user", "content": "u"}], MessageShape(parallel_calls=False))
    assert [m.get("tool_call_id") or m["role"] for m in shaped] == ["assistant", "a", "assistant", "b", "user"]
    assert [m.get("reasoning_content") for m in shaped if m["role"] == "assistant"] == ["hm", None]


def test_short_call_ids_pair_calls_and_results():
    shaped = shape_messages(
        [assistant(("call_12345", {})), {"role": "tool", "tool_call_id": "call_12345", "content": ""}],
        MessageShape(short_call_ids=True),
    )
    call_id = shaped[0]["tool_calls"][0]["id"]
    assert shaped[1]["tool_call_id"] == call_id
    assert len(call_id) == 9
    assert call_id.isalnum()


@given(st.text(max_size=30))
def test_a_short_id_is_stable_and_fits(call_id):
    short = short_id(call_id)
    assert short == short_id(call_id)
    assert len(short) == 9
    assert short.isalnum()


def test_the_given_messages_are_not_changed():
    turn = assistant(("a", '{"x": 1}'), reasoning="hm")
    before = json.dumps(turn)
    shape_messages([turn], MessageShape(reasoning_key="thinking", short_call_ids=True))
    assert json.dumps(turn) == before
