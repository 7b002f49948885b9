"""Arguments: every form a model sends becomes a dict that fits the schema, or a sentence; nothing is guessed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.turn.arguments import Normalized, normalize

TERMINAL = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}, "background": {"type": "boolean"}},
    "required": ["command"],
}
NO_REQUIRED = {"type": "object", "properties": {"limit": {"type": "integer"}}}
WRITE = {
    "type": "object",
    "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
    "required": ["path", "content"],
}


def terminal(raw: object) -> Normalized:
    return normalize(raw, "terminal", TERMINAL)


@pytest.mark.parametrize("raw", [{"command": "ls"}, '{"command": "ls"}', ' {"command":"ls"} '])
def test_an_object_or_its_json_text_is_valid_as_written(raw):
    result = terminal(raw)
    assert result.arguments == {"command": "ls"}
    assert result.schema_valid
    assert result.repairs == ()


@pytest.mark.parametrize(
    ("raw", "arguments", "repairs"),
    [
        (json.dumps(json.dumps({"command": "ls"})), {"command": "ls"}, ("double_encoded",)),
        (json.dumps(json.dumps(json.dumps({"command": "ls"}))), {"command": "ls"}, ("double_encoded",)),
        ("ls -la", {"command": "ls -la"}, ("plain_string",)),
        ('"ls -la"', {"command": "ls -la"}, ("double_encoded", "plain_string")),
        ({"input": "ls"}, {"command": "ls"}, ("input_for_command",)),
        ({"input": "ls", "command": None}, {"command": "ls"}, ("input_for_command",)),
        ({"command": "ls", "timeout": "5"}, {"command": "ls", "timeout": 5}, ("string_to_integer",)),
        ({"command": "ls", "timeout": 5.0}, {"command": "ls", "timeout": 5}, ("integral_float",)),
        ({"command": "ls", "background": "True"}, {"command": "ls", "background": True}, ("string_to_boolean",)),
        ({"command": "ls", "timeout": None}, {"command": "ls"}, ("null_dropped",)),
        ({"command": 42}, {"command": "42"}, ("integer_to_string",)),
        ([{"command": "ls"}], {"command": "ls"}, ("list_of_one",)),
        ('{"command": "a\nb"}', {"command": "a\nb"}, ("control_characters",)),
        ("{'command': 'ls', }", {"command": "ls"}, ("python_literal",)),
        ('```json\n{"command": "ls"}\n```', {"command": "ls"}, ("code_fence",)),
    ],
)
def test_what_had_to_be_changed_is_named_and_not_schema_valid(raw, arguments, repairs):
    result = terminal(raw)
    assert result.arguments == arguments
    assert result.repairs == repairs
    assert not result.schema_valid


@pytest.mark.parametrize(
    "raw",
    [None, "", "  ", "null", "[]", [], [1, 2], 5, 1.5, True, "5", '{"command": "rm -rf /tm', '{"command"', "[1,", {},
     {"cmd": "ls"}, {"command": ["ls"]}, {"command": {"a": 1}}, {"command": "ls", "timeout": "soon"},
     '{"command": NaN}', {"command": "\ud800"}, {1: 2}, {"command": b"ls"}, object(), '{"command": "ls"} and more'],
)  # fmt: skip
def test_what_cannot_be_understood_is_an_error_and_never_runs(raw):
    result = terminal(raw)
    assert result.arguments is None
    assert result.error
    assert "terminal" in result.error
    assert not result.schema_valid


def test_half_a_command_is_never_completed():
    assert terminal('{"command": "rm -rf /home/user/proj').arguments is None


@pytest.mark.parametrize(("raw", "repair"), [(None, "null"), ("", "empty"), ("null", "null"), ('""', "empty")])
def test_nothing_means_no_arguments_only_where_none_are_required(raw, repair):
    assert normalize(raw, "list", NO_REQUIRED).arguments == {}
    assert repair in normalize(raw, "list", NO_REQUIRED).repairs
    assert terminal(raw).arguments is None


def test_plain_text_goes_to_input_for_other_tools():
    assert normalize("hello", "echo", {}).arguments == {"input": "hello"}
    assert normalize("hello", "echo").repairs == ("plain_string",)


def test_plain_text_goes_to_the_only_required_parameter():
    schema = {
        "type": "object",
        "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
        "required": ["path"],
    }
    assert normalize("a.txt", "read_file", schema).arguments == {"path": "a.txt"}


def test_plain_text_for_two_required_parameters_is_an_error_that_names_them():
    result = normalize("a.txt", "write_file", WRITE)
    assert result.arguments is None
    assert "path, content" in (result.error or "")


def test_a_bare_number_is_understood_where_the_one_parameter_is_a_number():
    schema = {"type": "object", "properties": {"seconds": {"type": "number"}}, "required": ["seconds"]}
    assert normalize("5", "sleep", schema) == Normalized({"seconds": 5}, ("bare_value",))


URLS = {"type": "object", "properties": {"urls": {"type": "array", "items": {"type": "string"}}}, "required": ["urls"]}


@pytest.mark.parametrize(
    ("raw", "items", "arguments", "repairs"),
    [
        ("a", {"type": "string"}, ["a"], ("wrapped_in_array",)),
        (5, {"type": "integer"}, [5], ("wrapped_in_array",)),
        ("5", {"type": "integer"}, [5], ("wrapped_in_array", "string_to_integer")),
        ({"id": 1}, {"type": "object"}, [{"id": 1}], ("wrapped_in_array",)),
        ("a, b", None, ["a, b"], ("wrapped_in_array",)),
    ],
)
def test_a_bare_value_for_a_list_becomes_a_list_of_one_and_that_is_said(raw, items, arguments, repairs):
    schema = {"type": "object", "properties": {"x": {"type": "array", **({"items": items} if items else {})}}}
    assert normalize({"x": raw}, "f", schema) == Normalized({"x": arguments}, repairs)


@pytest.mark.parametrize("raw", ['["a", "b"', "", "[draft] a", {"a": 1}, 5.5, True])
def test_half_a_list_and_what_is_not_an_item_are_not_wrapped(raw):
    assert normalize({"urls": raw}, "web_extract", URLS).arguments is None


def test_a_bare_text_for_the_only_parameter_a_list_is_wrapped_too():
    assert normalize("http://a", "web_extract", URLS) == Normalized(
        {"urls": ["http://a"]}, ("plain_string", "wrapped_in_array")
    )


@pytest.mark.parametrize(
    ("raw", "choices", "meant"),
    [("horror", ["Horror", "War"], "Horror"), (True, ["True", "False"], "True"), (False, ["true", "false"], "false")],
)
def test_a_choice_in_another_case_is_the_one_it_can_only_mean(raw, choices, meant):
    schema = {"type": "object", "properties": {"x": {"type": "string", "enum": choices}}}
    assert normalize({"x": raw}, "f", schema) == Normalized({"x": meant}, ("enum_spelling",))


@pytest.mark.parametrize(("raw", "choices"), [("x", ["a"]), ("a ", ["a"]), ("READ", ["Read", "read"]), (True, [1.5])])
def test_a_choice_that_could_mean_two_or_none_is_refused(raw, choices):
    schema = {"type": "object", "properties": {"x": {"enum": choices}}}
    assert normalize({"x": raw}, "f", schema).arguments is None


def test_the_choices_of_a_list_are_those_of_its_items():
    schema = {"type": "object", "properties": {"x": {"type": "array", "items": {"type": "string"}, "enum": ["a", "b"]}}}
    assert normalize({"x": ["b", "a"]}, "f", schema) == Normalized({"x": ["b", "a"]})
    assert "'c' is not one of" in (normalize({"x": ["a", "c"]}, "f", schema).error or "")
    whole = {"type": "object", "properties": {"x": {"type": "array", "enum": [["a"], ["b"]]}}}
    assert normalize({"x": ["a"]}, "f", whole).schema_valid
    assert normalize({"x": ["a", "b"]}, "f", whole).arguments is None


def test_the_default_that_a_schema_names_is_valid_as_written():
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["C", "F"], "default": None},
            "days": {"type": "integer", "default": ""},
        },
        "required": ["city"],
    }
    assert normalize({"city": "Oslo", "unit": None, "days": ""}, "weather", schema) == Normalized(
        {"city": "Oslo", "unit": None, "days": ""}
    )
    assert normalize({"city": "Oslo", "days": "soon"}, "weather", schema).error


def test_input_is_left_alone_where_it_is_a_parameter_of_its_own():
    schema = {"type": "object", "properties": {"command": {"type": "string"}, "input": {"type": "string"}}}
    assert normalize({"input": "x"}, "run", schema).arguments == {"input": "x"}


def test_file_contents_are_never_touched():
    content = "  123\n\ttrue \n"
    assert normalize({"path": "a", "content": content}, "write_file", WRITE) == Normalized(
        {"path": "a", "content": content}
    )


def test_nested_values_are_coerced_too():
    schema = {
        "type": "object",
        "properties": {
            "todos": {"type": "array", "items": {"type": "object", "properties": {"id": {"type": "integer"}}}},
            "merge": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        },
    }
    result = normalize({"todos": '[{"id": "1"}]', "merge": "false"}, "todo", schema)
    assert result.arguments == {"todos": [{"id": 1}], "merge": False}
    assert set(result.repairs) == {"string_to_array", "string_to_integer", "string_to_boolean"}


def test_errors_name_the_parameter_and_what_is_expected():
    error = terminal({"command": "ls", "timeout": "soon"}).error or ""
    assert "timeout" in error
    assert "integer" in error


def test_additional_properties_are_refused_where_the_schema_forbids_them():
    schema = {**TERMINAL, "additionalProperties": False}
    assert "extra" in (normalize({"command": "ls", "extra": 1}, "terminal", schema).error or "")


@pytest.mark.parametrize(
    "schema",
    [None, {"type": 5}, {"$ref": "http://127.0.0.1:9/schema.json"}, {"properties": []}, {"required": "command"}, "x"],
)
def test_a_broken_schema_or_a_remote_reference_refuses_nothing_and_fetches_nothing(schema):
    assert normalize({"command": "ls"}, "terminal", schema).arguments == {"command": "ls"}


def test_bottomless_nesting_is_an_error_not_a_crash():
    assert terminal("[" * 200_000).error
    assert terminal('{"a":' * 50_000).error
    deep: dict[str, object] = {}
    for _ in range(50_000):
        deep = {"a": deep}
    assert isinstance(normalize(deep, "x", {"type": "object", "properties": {"a": {"type": "object"}}}), Normalized)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYED = st.dictionaries(st.sampled_from(["command", "input", "timeout", "background", "path", "x"]), JSON, max_size=4)
RAW = JSON | KEYED | st.builds(json.dumps, KEYED) | st.builds(lambda v: json.dumps(json.dumps(v)), KEYED) | st.text()
SIMPLE = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null"])
PROPERTY = st.builds(lambda kind: {"type": kind}, SIMPLE | st.lists(SIMPLE, min_size=1, max_size=3, unique=True))
SCHEMA = st.builds(
    lambda properties, required: {"type": "object", "properties": properties, "required": required},
    st.dictionaries(st.sampled_from(["command", "input", "timeout", "path"]), PROPERTY, max_size=4),
    st.lists(st.sampled_from(["command", "timeout", "path"]), max_size=2, unique=True),
)


@given(raw=RAW, name=st.sampled_from(["terminal", "other"]), schema=SCHEMA)
def test_normalization_never_raises_and_gives_a_dict_or_an_error(raw, name, schema):
    result = normalize(raw, name, schema)
    assert (result.arguments is None) == (result.error is not None)
    if result.arguments is not None:
        assert isinstance(result.arguments, dict)
        json.dumps(result.arguments, allow_nan=False).encode()
        assert set(schema["required"]) <= set(result.arguments)


@given(raw=RAW, name=st.sampled_from(["terminal", "other"]), schema=SCHEMA)
def test_normalization_is_idempotent(raw, name, schema):
    first = normalize(raw, name, schema)
    if first.arguments is not None:
        again = normalize(first.arguments, name, schema)
        assert again == Normalized(first.arguments)
        assert normalize(json.dumps(first.arguments), name, schema).schema_valid


@given(raw=RAW, schema=SCHEMA)
def test_schema_valid_means_that_nothing_was_changed(raw, schema):
    result = normalize(raw, "terminal", schema)
    if result.schema_valid:
        assert result.arguments == (json.loads(raw) if isinstance(raw, str) else raw)
