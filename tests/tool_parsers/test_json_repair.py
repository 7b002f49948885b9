"""The repair ladder: what is repaired, under which name, and what is refused."""

# ruff: noqa: E501 - markers and cases stand on one line each

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tool_parsers import ToolCall, get_parser
from tool_parsers.jsonread import Decoded, Fault, loads


def call_of(body: str, *, strict: bool = False) -> ToolCall:
    result = get_parser("hermes", strict=strict).parse(f"<tool_call>\n{body}\n</tool_call>")
    assert len(result.calls) == 1, result
    return result.calls[0]


REPAIRS = [
    ("single_quotes", "{'name': 'f', 'arguments': {'a': 'it is'}}", {"a": "it is"}),
    ("single_quotes", """{'name': 'f', 'arguments': {'a': 'say "hi"'}}""", {"a": 'say "hi"'}),
    ("python_literal", '{"name": "f", "arguments": {"a": True, "b": None, "c": False}}', {"a": True, "b": None, "c": False}),
    ("trailing_comma", '{"name": "f", "arguments": {"a": [1, 2,],},}', {"a": [1, 2]}),
    ("raw_newline", '{"name": "f", "arguments": {"a": "line1\nline2\tx"}}', {"a": "line1\nline2\tx"}),
    ("bad_escape", r'{"name": "f", "arguments": {"a": "\d+ \$x"}}', {"a": r"\d+ \$x"}),
    ("bad_escape", r"""{"name": "f", "arguments": {"a": "it\'s"}}""", {"a": "it's"}),
    ("missing_bracket", '{"name": "f", "arguments": {"a": 1}', {"a": 1}),
    ("missing_bracket", '{"name": "f", "arguments": {"a": [1, 2', {"a": [1, 2]}),
    ("missing_bracket", '{"name": "f", "arguments": {"a": [1, 2}}', {"a": [1, 2]}),
    ("extra_bracket", '{"name": "f", "arguments": {"a": 1}}}', {"a": 1}),
    ("extra_bracket", '{"name": "f", "arguments": {"a": 1}}}}}', {"a": 1}),
    ("fence", '```json\n{"name": "f", "arguments": {"a": 1}}\n```', {"a": 1}),
    ("string_arguments", '{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
    ("string_arguments", json.dumps({"name": "f", "arguments": json.dumps(json.dumps({"a": 1}))}), {"a": 1}),
    ("unquoted_key", '{name: "f", arguments: {a: 1}}', {"a": 1}),
    ("inner_quotes", '{"name": "f", "arguments": {"a": "print("hi") now"}}', {"a": 'print("hi") now'}),
    ("escaped_json", '{\\"name\\": \\"f\\", \\"arguments\\": {\\"a\\": 1}}', {"a": 1}),
    ("escaped_json", json.dumps('{"name": "f", "arguments": {"a": 1}}'), {"a": 1}),
    ("text_before_json", 'Calling: {"name": "f", "arguments": {"a": 1}}', {"a": 1}),
    ("lone_surrogate", '{"name": "f", "arguments": {"a": "x\\ud800y"}}', {"a": "x�y"}),
]  # fmt: skip


@pytest.mark.parametrize(("repair", "body", "arguments"), REPAIRS, ids=lambda value: str(value)[:40])
def test_common_faults_are_repaired_and_named(repair: str, body: str, arguments: dict[str, object]) -> None:
    call = call_of(body)
    assert (call.name, call.arguments, call.error) == ("f", arguments, None)
    assert repair in call.repaired


@pytest.mark.parametrize(("repair", "body", "_arguments"), REPAIRS, ids=lambda value: str(value)[:40])
def test_strict_turns_every_repair_into_an_error(repair: str, body: str, _arguments: dict[str, object]) -> None:
    call = call_of(body, strict=True)
    assert call.error
    assert repair in call.error
    assert call.arguments == {}


def test_strict_leaves_valid_calls_alone() -> None:
    assert call_of('{"name": "f", "arguments": {"a": [1, {"b": null}]}}', strict=True).arguments == {
        "a": [1, {"b": None}]
    }


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_not_json_are_refused(word: str) -> None:
    call = call_of(f'{{"name": "f", "arguments": {{"a": {word}}}}}')
    assert call.error
    assert "not a JSON value" in call.error
    assert call.arguments == {}


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f", "arguments": "not json"}',
        '{"name": "f", "arguments": [1, 2]}',
        '{"name": "f", "arguments": 7}',
        '{"name": "f", "arguments": {"a" "b" : : }}',
        '{"name": "f", "arguments": {"a": ' + "[" * 5000 + "}}",
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
    ],
    ids=["text", "list", "number", "nonsense", "bottomless", "endless number"],
)
def test_arguments_beyond_repair_give_an_error_with_the_name(body: str) -> None:
    call = call_of(body)
    assert call.name == "f"
    assert call.error
    assert call.error.endswith((".", "!"))
    assert call.arguments == {}


@pytest.mark.parametrize(
    "arguments", ['"arguments": null', '"arguments": ""', '"parameters": {}', '"args": {}', '"x": 1']
)
def test_empty_arguments_in_any_spelling_are_an_empty_object(arguments: str) -> None:
    assert call_of(f'{{"name": "f", {arguments}}}').arguments == {}


def test_openai_shaped_calls_are_read() -> None:
    body = '{"type": "function", "function": {"name": "f", "arguments": "{\\"a\\": 1}"}}'
    assert call_of(body).arguments == {"a": 1}


@pytest.mark.parametrize("between", ["\n", ", ", "; ", "\n\n", "]\n["])
def test_several_objects_in_one_tag_are_several_calls(between: str) -> None:
    one, two = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {"b": 2}}'
    result = get_parser("hermes").parse(f"<tool_call>[{one}{between}{two}]</tool_call>")
    assert [(call.name, call.arguments) for call in result.good_calls] == [("f", {"a": 1}), ("g", {"b": 2})]


def test_a_broken_object_in_an_array_costs_no_neighbour() -> None:
    good, bad = '{"name": "f", "arguments": {"a": %d}}', '{"name": "g", "arguments": {"b" 2}}'
    result = get_parser("jamba").parse(f"<tool_calls>[{good % 1}, {bad}, {good % 2}]</tool_calls>")
    assert [call.arguments for call in result.good_calls] == [{"a": 1}, {"a": 2}]
    assert [(call.name, bool(call.error)) for call in result.calls] == [("f", False), ("g", True), ("f", False)]


def test_a_cut_call_after_a_good_one_keeps_the_good_one() -> None:
    text = (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n<tool_call>{"name": "g", "arguments": {"b": "xy'
    )
    result = get_parser("hermes").parse(text)
    assert [(call.name, call.ok, call.complete) for call in result.calls] == [("f", True, True), ("g", False, False)]
    assert "cut off" in str(result.calls[1].error)


def test_a_call_without_its_closing_tag_is_emitted_and_flagged() -> None:
    result = get_parser("hermes").parse('<tool_call>{"name": "f", "arguments": {"a": 1}}')
    assert [(call.arguments, call.ok, call.complete) for call in result.calls] == [({"a": 1}, True, False)]


def test_repair_survives_closing_tags_inside_strings() -> None:
    result = get_parser("hermes").parse("<tool_call>{'name': 'f', 'arguments': {'a': '</tool_call>', }}</tool_call> x")
    assert [call.arguments for call in result.good_calls] == [{"a": "</tool_call>"}]
    assert result.trailing == "x"


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), json_values, max_size=4), st.booleans())
def test_what_json_writes_is_read_back(value: dict[str, object], ascii_only: bool) -> None:
    outcome = loads(json.dumps(value, ensure_ascii=ascii_only))
    assert isinstance(outcome, Decoded)
    assert outcome.value == value
    assert outcome.repairs == ()


simple_text = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\\"), max_size=12)


@given(st.dictionaries(simple_text.filter(bool), simple_text | st.integers() | st.booleans() | st.none(), max_size=4))
def test_what_python_writes_is_read_back_where_no_quote_is_ambiguous(value: dict[str, object]) -> None:
    if any("'" in str(item) or '"' in str(item) for pair in value.items() for item in pair):
        return
    outcome = loads(repr(value))
    assert isinstance(outcome, Decoded)
    assert outcome.value == value


@given(st.text(alphabet="{}[]\",:\\'ntrue 01.-eNaIfy\n\ud800", max_size=60))
def test_no_text_makes_the_reader_raise(text: str) -> None:
    assert isinstance(loads(text), Decoded | Fault)


TERMINAL = {"name": "terminal", "parameters": {"properties": {"command": {}, "timeout": {}}, "required": ["command"]}}


def test_a_plain_string_as_arguments_goes_to_the_one_parameter_it_can_mean() -> None:
    text = '<tool_call>{"name": "terminal", "arguments": "ls -la"}</tool_call>'
    parsed = get_parser("hermes").parse(text, [TERMINAL])
    assert [(c.arguments, c.repaired, c.error) for c in parsed.calls] == [
        ({"command": "ls -la"}, ("plain_string",), None)
    ]
    assert parsed.content == ""


@pytest.mark.parametrize("tools", [None, [{"name": "terminal", "parameters": {"properties": {"a": {}, "b": {}}}}]])
def test_a_plain_string_that_no_schema_can_place_is_an_error(tools) -> None:
    text = '<tool_call>{"name": "terminal", "arguments": "ls -la"}</tool_call>'
    (call,) = get_parser("hermes").parse(text, tools).calls
    assert call.error
    assert call.arguments == {}


def test_half_an_object_in_a_string_is_never_a_plain_string() -> None:
    text = r'<tool_call>{"name": "terminal", "arguments": "{\"command\": \"rm -rf /tm"}</tool_call>'
    (call,) = get_parser("hermes").parse(text, [TERMINAL]).calls
    assert call.error
