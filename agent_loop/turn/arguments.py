"""Tool arguments as the model wrote them -> a dict that fits the tool's schema, or a sentence the model can act on.

Promises: never raises; never runs `{}` in place of what was meant; whatever had to be changed is named in `repairs`,
and `schema_valid` is true only when nothing was. Normalizing the result again changes nothing.
Forms are understood in `argument_forms.py`, values are coerced in `argument_values.py`; here they meet the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import orjson
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

from agent_loop.turn.argument_forms import Decoded, decode, input_for_command, not_json

_INTEGER = re.compile(r"[+-]?\d{1,18}")
_NUMBER = re.compile(r"[+-]?(\d{1,18}(\.\d{1,18})?|\.\d{1,18})([eE][+-]?\d{1,2})?")
_BOOLEANS = {"true": True, "false": False}
_NAMED = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
    "null": type(None),
}


def coerce(value: Any, schema: Any, repairs: list[str]) -> Any:
    """The value, coerced to the schema's type where that is harmless; appends to `repairs` what it did."""
    if not isinstance(schema, Mapping):
        return value
    types = _types(schema)
    if types and not _fits(value, types):
        value = _convert(value, types, repairs)
    elif isinstance(value, float) and "integer" in types and "number" not in types:
        repairs.append("integral_float")
        value = int(value)
    if isinstance(value, dict):
        return _coerce_object(value, schema, repairs)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [coerce(item, schema["items"], repairs) for item in value]
    return value


def _coerce_object(value: dict[str, Any], schema: Mapping[str, Any], repairs: list[str]) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return value
    required = schema.get("required")
    required = required if isinstance(required, list) else []
    result: dict[str, Any] = {}
    for key, item in value.items():
        if key not in properties:
            result[key] = item
            continue
        types = _types(properties[key])
        if item is None and types and "null" not in types and key not in required:
            repairs.append("null_dropped")
            continue
        result[key] = coerce(item, properties[key], repairs)
    return result


def _types(schema: Any) -> tuple[str, ...]:
    """The declared types; through `anyOf`/`oneOf` as pydantic writes optional fields; () when there is no telling."""
    if not isinstance(schema, Mapping):
        return ()
    declared = schema.get("type")
    if declared is not None:
        return _known(declared if isinstance(declared, list) else [declared])
    options = schema.get("anyOf") or schema.get("oneOf")
    found = [_types(option) for option in options] if isinstance(options, list) else []
    return tuple(name for names in found for name in names) if all(found) else ()


def _known(names: list[Any]) -> tuple[str, ...]:
    """The names if each is a JSON type, else ()."""
    return tuple(names) if all(isinstance(name, str) and name in _NAMED for name in names) else ()


def _fits(value: Any, types: tuple[str, ...]) -> bool:
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return True
    return any(isinstance(value, _NAMED[name]) for name in types)  # type: ignore[arg-type]


def _convert(value: Any, types: tuple[str, ...], repairs: list[str]) -> Any:
    if isinstance(value, str):
        return _from_text(value, types, repairs)
    if isinstance(value, int) and not isinstance(value, bool) and "string" in types and abs(value) < 10**18:
        repairs.append("integer_to_string")
        return str(value)
    return value


def _from_text(text: str, types: tuple[str, ...], repairs: list[str]) -> Any:
    word = text.strip()
    if "integer" in types and _INTEGER.fullmatch(word):
        repairs.append("string_to_integer")
        return int(word)
    if "number" in types and _NUMBER.fullmatch(word):
        repairs.append("string_to_number")
        return int(word) if _INTEGER.fullmatch(word) else float(word)
    if "boolean" in types and word.lower() in _BOOLEANS:
        repairs.append("string_to_boolean")
        return _BOOLEANS[word.lower()]
    for name, opener in (("array", "["), ("object", "{")):
        if name in types and word.startswith(opener):
            return _from_json_text(text, name, repairs)
    return text


def _from_json_text(text: str, name: str, repairs: list[str]) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, _NAMED[name]):  # type: ignore[arg-type]
        return text
    repairs.append(f"string_to_{name}")
    return value


MAX_PROBLEMS = 3
"""Schema violations named in one error; more would not help the model."""


@dataclass(frozen=True)
class Normalized:
    """Arguments ready to run, or the error to show the model (then `arguments` is None)."""

    arguments: dict[str, Any] | None
    repairs: tuple[str, ...] = ()
    error: str | None = None

    @property
    def schema_valid(self) -> bool:
        """The arguments fit the schema exactly as the model wrote them."""
        return self.error is None and not self.repairs


class _Validator(Protocol):
    def __call__(self, arguments: dict[str, Any], /) -> str | None: ...


def normalize(raw: Any, name: str, parameters: Mapping[str, Any] | None = None) -> Normalized:
    """Normalize the arguments of a call of tool `name` against its JSON schema `parameters`."""
    schema = parameters if isinstance(parameters, Mapping) else {}
    try:
        return _normalize(raw, name, schema)
    except RecursionError:
        return Normalized(None, error=f"The arguments of {name} are nested too deeply.")


def _normalize(raw: Any, name: str, schema: Mapping[str, Any]) -> Normalized:
    decoded = decode(raw, name, schema)
    if decoded.arguments is None:
        return Normalized(None, decoded.repairs, _explain(decoded, name, schema))
    repairs = list(decoded.repairs)
    arguments = input_for_command(decoded.arguments, name, schema, repairs)
    coerced = coerce(arguments, schema, repairs)
    if not isinstance(coerced, dict):  # coercion keeps objects objects
        coerced = arguments
    problem = not_json(coerced) or validator(schema)(coerced)
    changes = tuple(dict.fromkeys(repairs))
    if problem is not None:
        return Normalized(None, changes, f"Invalid arguments for {name}: {problem}")
    return Normalized(coerced, changes)


def _explain(decoded: Decoded, name: str, schema: Mapping[str, Any]) -> str:
    properties = schema.get("properties")
    known = ", ".join(properties) if isinstance(properties, Mapping) else ""
    expected = f" Send one JSON object with: {known}." if known else " Send one JSON object."
    return f"Invalid arguments for {name}: {decoded.error}.{expected}"


def validator(schema: Mapping[str, Any]) -> _Validator:
    """A function that names what is wrong with arguments, or None; compiled once per schema."""
    try:
        return _compiled(orjson.dumps(schema, option=orjson.OPT_SORT_KEYS))
    except (orjson.JSONEncodeError, RecursionError):
        return _accept


@lru_cache(maxsize=1024)
def _compiled(schema_json: bytes) -> _Validator:
    schema = orjson.loads(schema_json)
    if schema in ({}, {"type": "object"}):
        return _accept
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError:
        return _accept  # a schema that is no schema cannot refuse anything; the tool itself still can
    # An empty registry: a `$ref` to some address must never become a network request.
    checker = Draft202012Validator(schema, registry=Registry())
    return _checking(checker.iter_errors)


def _checking(iter_errors: Callable[[Any], Any]) -> _Validator:
    def check(arguments: dict[str, Any], /) -> str | None:
        try:
            errors = sorted(iter_errors(arguments), key=lambda error: [str(part) for part in error.absolute_path])
        except Unresolvable:
            return None
        return "; ".join(map(_sentence, errors[:MAX_PROBLEMS])) or None

    return check


def _accept(arguments: dict[str, Any], /) -> str | None:
    return None


def _sentence(error: ValidationError) -> str:
    path = ".".join(str(part) for part in error.absolute_path)
    message = error.message if len(error.message) <= 300 else f"{error.message[:200]} ... {error.message[-80:]}"
    return f"{path}: {message}" if path else message
