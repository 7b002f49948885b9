"""Typing of text values from a tool's JSON schema: one rule for every format that writes arguments as text.

A value starts as text. With a schema it becomes null, integer, number, boolean, object or array only when that type is
declared and the text is exactly that; text that does not fit stays text. Where a union also allows a string, only text
that is unambiguous JSON of another declared type is converted. Data is never stripped.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tool_parsers.jsonread import Decoded, Fault, loads
from tool_parsers.pyliteral import python_value

_ALIASES = {
    "str": "string", "text": "string", "varchar": "string", "char": "string", "enum": "string",
    "int": "integer", "int32": "integer", "int64": "integer", "uint": "integer", "long": "integer", "short": "integer",
    "float": "number", "float32": "number", "float64": "number", "double": "number", "decimal": "number",
    "bool": "boolean", "binary": "boolean",
    "dict": "object", "map": "object", "struct": "object",
    "list": "array", "tuple": "array", "set": "array", "arr": "array",
    "none": "null",
}  # fmt: skip
_TYPE_NAMES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_INTEGER = re.compile(r"[+-]?\d{1,4000}")
_NUMBER = re.compile(r"[+-]?(?:\d{1,400}(?:\.\d*)?|\.\d{1,400})(?:[eE][+-]?\d{1,5})?")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9]\d{0,400})(?:\.\d{1,400})?(?:[eE][+-]?\d{1,5})?")
_MAX_UNION_DEPTH = 8


@dataclass(frozen=True)
class Tools:
    """The declared tools, by name."""

    parameters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    given: bool = False

    @classmethod
    def of(cls, tools: Sequence[Any] | Tools | None) -> Tools:
        """Read OpenAI-shaped tools (or bare function objects); what has no name is left out. Read once for many
        parses, they can be given as they are."""
        if isinstance(tools, Tools):
            return tools
        found: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            function = tool.get("function", tool) if isinstance(tool, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if isinstance(name, str) and isinstance(function, Mapping):
                schema = function.get("parameters") or function.get("input_schema")
                found[name] = _expanded(schema, schema, 0) if isinstance(schema, Mapping) else {}
        return cls(found, tools is not None)

    def declared(self, name: str) -> bool | None:
        """Whether the name is declared; None when no tools were given."""
        return name in self.parameters if self.given else None

    def properties(self, name: str) -> Mapping[str, Any]:
        """The property schemas of one tool ({} when unknown)."""
        return properties_of(self.parameters.get(name, {}))


def _expanded(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    """The schema with local references put in place (a few levels deep: recursive schemas end there)."""
    if depth > _MAX_UNION_DEPTH:
        return schema
    if isinstance(schema, list):
        return [_expanded(item, root, depth + 1) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for part in reference[2:].split("/"):
            target = target.get(part, {}) if isinstance(target, Mapping) else {}
        schema = {**target, **schema} if isinstance(target, Mapping) else schema
    return {
        key: _expanded(item, root, depth + 1)
        for key, item in schema.items()
        if key not in ("$defs", "definitions", "$ref")
    }


def properties_of(schema: Any) -> Mapping[str, Any]:
    """The property schemas of an object schema, looking into unions too."""
    if not isinstance(schema, Mapping):
        return {}
    found = schema.get("properties")
    if isinstance(found, Mapping):
        return found
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in _branches(schema, key):
            if properties_of(branch):
                return properties_of(branch)
    return {}


def sole_parameter(schema: Mapping[str, Any] | None) -> str | None:
    """The parameter that a bare value can only be meant for, or None when the schema leaves a choice."""
    properties = properties_of(schema)
    for usual in ("command", "input"):
        if usual in properties:
            return usual
    required = schema.get("required") if schema else None
    if isinstance(required, list) and len(required) == 1 and isinstance(required[0], str):
        return required[0]
    return next(iter(properties)) if len(properties) == 1 else None


def items_of(schema: Any) -> Any:
    """The element schema of an array schema, looking into unions too."""
    if not isinstance(schema, Mapping):
        return None
    if "items" in schema:
        return schema["items"]
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in _branches(schema, key):
            if isinstance(branch, Mapping) and "items" in branch:
                return branch["items"]
    return None


def _branches(schema: Mapping[str, Any], key: str) -> Sequence[Any]:
    found = schema.get(key)
    return found if isinstance(found, list) else ()


def types_of(schema: Any, depth: int = 0) -> frozenset[str]:
    """The JSON types a schema allows; empty when it says nothing."""
    if not isinstance(schema, Mapping) or depth > _MAX_UNION_DEPTH:
        return frozenset()
    found = _stated_types(schema)
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in _branches(schema, key):
            found |= types_of(branch, depth + 1)
    found = found or _implied_types(schema)
    takes_null = schema.get("nullable") is True or schema.get("default", "") is None
    return frozenset(found | {"null"} if found and takes_null else found)


def _stated_types(schema: Mapping[str, Any]) -> set[str]:
    """What `type` says, or else the types of the values listed."""
    declared = schema.get("type")
    names = declared if isinstance(declared, list) else [declared]
    found = {_ALIASES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)}
    values = schema.get("enum")
    listed = values if isinstance(values, list) else [schema["const"]] if "const" in schema else []
    return found or {_TYPE_NAMES.get(type(value), "null") for value in listed}


def _implied_types(schema: Mapping[str, Any]) -> set[str]:
    if "properties" in schema:
        return {"object"}
    return {"array"} if "items" in schema else set()


def typed(text: str, schema: Any, untyped: Callable[[str], Any] | None = None) -> Any:
    """The text as the value its schema asks for; `untyped` decides where the schema says nothing."""
    allowed = types_of(schema)
    if not allowed:
        return untyped(text) if untyped else text
    bare = text.strip()
    if bare in ("null", "None") and "string" not in allowed:
        return None
    for kind, read in _READERS:
        if kind in allowed:
            value = read(bare, "string" in allowed)
            if value is not _UNFIT:
                return fitted(value, schema) if kind in ("object", "array") else value
    return text


def fitted(value: Any, schema: Any) -> Any:
    """An already typed value, with containers looked into: text the schema wants typed, and the reverse."""
    allowed = types_of(schema)
    if isinstance(value, dict):
        properties = properties_of(schema)
        return {key: fitted(item, properties.get(key)) for key, item in value.items()}
    if isinstance(value, list):
        element = items_of(schema)
        return [fitted(item, element) for item in value]
    if isinstance(value, str) and allowed and "string" not in allowed:
        return typed(value, schema)
    return value


def as_text(value: Any) -> str:
    """A typed value turned back into the text a string parameter wants."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def json_or_text(text: str) -> Any:
    """The text as JSON when it is exactly JSON (NaN and Infinity are not); otherwise the text."""
    bare = text.strip()
    if not bare or bare[0] not in '{["-0123456789tfn':
        return text
    outcome = loads(bare)
    return outcome.value if isinstance(outcome, Decoded) and not outcome.repairs else text


_UNFIT = object()


def _null(bare: str, or_string: bool) -> Any:
    return None if bare == "null" or (not or_string and bare.lower() in ("null", "none")) else _UNFIT


def _integer(bare: str, or_string: bool) -> Any:
    pattern = _JSON_NUMBER if or_string else _INTEGER
    if pattern.fullmatch(bare) and _INTEGER.fullmatch(bare):
        return int(bare)
    if not or_string and _NUMBER.fullmatch(bare):
        number = float(bare)
        if math.isfinite(number) and number == int(number):
            return int(number)
    return _UNFIT


def _number(bare: str, or_string: bool) -> Any:
    pattern = _JSON_NUMBER if or_string else _NUMBER
    if not pattern.fullmatch(bare):
        return _UNFIT
    if _INTEGER.fullmatch(bare):
        return int(bare)
    number = float(bare)
    return number if math.isfinite(number) else _UNFIT


def _boolean(bare: str, or_string: bool) -> Any:
    if bare in ("true", "false"):
        return bare == "true"
    if or_string:
        return _UNFIT
    lowered = bare.lower()
    if lowered in ("true", "1"):
        return True
    return False if lowered in ("false", "0") else _UNFIT


def _container(bracket: str, kind: type) -> Callable[[str, bool], Any]:
    def read(bare: str, or_string: bool) -> Any:
        bare = _unquoted(bare)
        if bare[:1] != bracket:
            return _UNFIT
        outcome = loads(bare)
        if isinstance(outcome, Decoded) and isinstance(outcome.value, kind) and not outcome.repairs:
            return outcome.value
        if or_string:
            return _UNFIT
        return next((value for value in _guesses(bare, outcome) if isinstance(value, kind)), _UNFIT)

    return read


def _unquoted(bare: str) -> str:
    """The JSON inside a JSON string, or the text itself."""
    inner = loads(bare) if bare[:1] == '"' and bare[-1:] == '"' else None
    return inner.value if isinstance(inner, Decoded) and isinstance(inner.value, str) else bare


def _guesses(bare: str, outcome: Decoded | Fault) -> Iterator[Any]:
    """What almost-JSON may mean: a Python literal, repaired JSON, JSON escaped once more than it should be."""
    yield python_value(bare)
    if isinstance(outcome, Decoded):
        yield outcome.value
    elif '\\"' in bare:
        once = loads(f'"{bare}"')
        twice = loads(once.value) if isinstance(once, Decoded) else once
        yield twice.value if isinstance(twice, Decoded) else None


_READERS: tuple[tuple[str, Callable[[str, bool], Any]], ...] = (
    ("null", _null),
    ("integer", _integer),
    ("number", _number),
    ("boolean", _boolean),
    ("object", _container("{", dict)),
    ("array", _container("[", list)),
)
