"""Typing of text values from a schema."""

# ruff: noqa: E501 - markers and cases stand on one line each

from __future__ import annotations

from typing import Any

import pytest

from tool_parsers.schema import Tools, fitted, json_or_text, typed, types_of

S = {"type": "string"}
I = {"type": "integer"}  # noqa: E741
N = {"type": "number"}
B = {"type": "boolean"}
O = {"type": "object"}  # noqa: E741
A = {"type": "array"}

CASES: list[tuple[str, Any, Any]] = [
    ("5", S, "5"), ("null", S, "null"), (" x ", S, " x "), ("", S, ""), ("true", S, "true"),
    ("5", I, 5), ("-5", I, -5), ("+5", I, 5), ("007", I, 7), ("5.0", I, 5), ("5.5", I, "5.5"), ("1_000", I, "1_000"), ("x", I, "x"),
    ("5", N, 5), ("5.5", N, 5.5), ("1e3", N, 1000.0), ("nan", N, "nan"), ("inf", N, "inf"), ("1e999", N, "1e999"), (".5", N, 0.5),
    ("true", B, True), ("False", B, False), ("1", B, True), ("0", B, False), ("yes", B, "yes"),
    ('{"a": 1}', O, {"a": 1}), ("{'a': True}", O, {"a": True}), ("[1]", O, "[1]"), ("{broken", O, "{broken"), ("{1, 2}", O, "{1, 2}"),
    ("[1, 2]", A, [1, 2]), ("['a']", A, ["a"]), ("null", A, None), ("x", A, "x"),
    (r'[{\"a\": \"b\\\\c\"}]', A, [{"a": "b\\c"}]),
    ('"[1, 2]"', A, [1, 2]),
    ("null", {"type": ["string", "null"]}, None), ("None", {"type": ["string", "null"]}, "None"), ("none", {"type": ["integer", "null"]}, None),
    ("5", {"type": ["string", "integer"]}, 5), ("007", {"type": ["string", "integer"]}, "007"), ("5 apples", {"type": ["string", "integer"]}, "5 apples"),
    ("1", {"anyOf": [S, B]}, "1"), ("true", {"anyOf": [S, B]}, True), ("{'a': 1}", {"anyOf": [S, O]}, "{'a': 1}"), ('{"a": 1}', {"anyOf": [S, O]}, {"a": 1}),
    ("3", {"enum": [1, 2, 3]}, 3), ("a", {"enum": ["a", "b"]}, "a"), ("3", {"enum": ["3"]}, "3"), ("2", {"const": 2}, 2),
    ("5", {"type": "int64"}, 5), ("5", {"type": "str"}, "5"), ("[1]", {"type": "list"}, [1]), ("1", {"type": "FLOAT32"}, 1),
    ("x", {}, "x"), ("5", None, "5"), ("5", {"description": "no type"}, "5"),
    ('{"a": "5", "b": ["1"]}', {"type": "object", "properties": {"a": I, "b": {"type": "array", "items": I}}}, {"a": 5, "b": [1]}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "schema", "value"), CASES, ids=lambda item: repr(item)[:30])
def test_text_becomes_what_the_schema_asks_for_or_stays_text(text: str, schema: Any, value: Any) -> None:
    found = typed(text, schema)
    assert found == value
    assert type(found) is type(value)


def test_a_hostile_schema_is_survived() -> None:
    loop: dict[str, Any] = {"type": "object"}
    loop["anyOf"] = [loop]
    assert types_of(loop) == {"object"}
    for schema in ([], "x", {"type": 7}, {"anyOf": "x"}, {"enum": "x"}, {"properties": 3}):
        assert typed("x", schema) == "x"


@pytest.mark.parametrize(
    "tools", [None, [], [None], ["x"], [{"function": 3}], [{"name": 3}], [{"function": {"name": "f", "parameters": 3}}]]
)
def test_odd_tool_lists_are_survived(tools: Any) -> None:
    assert Tools.of(tools).properties("f") == {}


def test_local_references_are_followed() -> None:
    schema = {"properties": {"p": {"$ref": "#/$defs/Point"}}, "$defs": {"Point": {"type": "object"}}}
    tools = Tools.of([{"function": {"name": "f", "parameters": schema}}])
    assert typed('{"x": 1}', tools.properties("f")["p"]) == {"x": 1}


def test_recursive_references_end() -> None:
    schema = {
        "properties": {"p": {"$ref": "#/$defs/Node"}},
        "$defs": {"Node": {"properties": {"next": {"$ref": "#/$defs/Node"}}}},
    }
    assert Tools.of([{"function": {"name": "f", "parameters": schema}}]).declared("f")


def test_typed_values_are_looked_into_but_strings_stay_where_allowed() -> None:
    assert fitted({"a": "1", "b": "1"}, {"properties": {"a": I, "b": S}}) == {"a": 1, "b": "1"}


@pytest.mark.parametrize(
    ("text", "value"), [("5", 5), ("x", "x"), ("NaN", "NaN"), ("[1]", [1]), ("{a", "{a"), ("null", None), (" 5", 5)]
)
def test_json_or_text_takes_only_exact_json(text: str, value: Any) -> None:
    assert json_or_text(text) == value
