"""Harmless coercions of argument values towards their JSON schema, each named as a repair.

Harmless means that the text the model wrote can be read in one way only: "5" for an integer, "true" for a boolean,
`null` for an optional parameter, a JSON text for a list. Anything else is left for validation to refuse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

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
