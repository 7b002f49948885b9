"""The forms in which models send arguments: object, JSON text, text in text, plain text, null, lists, numbers.

`decode` turns any of them into a dict with the repairs it took, or says why it cannot be understood.
Broken JSON is never completed or guessed here: half a command must not run.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_ENCODINGS = 4
"""JSON inside JSON strings is followed this deep."""

_FENCE = re.compile(r"\A\s*```(?:json)?[ \t]*\n(.*)\n[ \t]*```\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Decoded:
    """A dict of arguments and the repairs it took, or an error (a phrase without a full stop)."""

    arguments: dict[str, Any] | None
    repairs: tuple[str, ...] = ()
    error: str | None = None


def decode(raw: Any, name: str, schema: Mapping[str, Any]) -> Decoded:
    """Understand raw arguments; JSON text that holds an object is the normal form and no repair."""
    if isinstance(raw, str):
        return _decode_text(raw, name, schema)
    return _decode_value(raw, name, schema, ())


def _decode_text(text: str, name: str, schema: Mapping[str, Any]) -> Decoded:
    repairs: tuple[str, ...] = ()
    value: Any = text
    for depth in range(MAX_ENCODINGS):
        if not value.strip():
            return _nothing("empty", schema, repairs)
        parsed, repair, problem = _loads(value)
        if problem is not None:
            if _looks_like_json(value):
                return Decoded(None, repairs, f"not valid JSON ({problem})")
            return _plain(value, name, schema, repairs)
        repairs += repair
        if not isinstance(parsed, str):
            return _decode_value(parsed, name, schema, repairs)
        value = parsed
        if depth == 0:
            repairs += ("double_encoded",)
    return Decoded(None, repairs, "JSON text nested in JSON text too deeply")


def _decode_value(value: Any, name: str, schema: Mapping[str, Any], repairs: tuple[str, ...]) -> Decoded:
    if isinstance(value, Mapping):
        return _object(value, repairs)
    if value is None:
        return _nothing("null", schema, repairs)
    if isinstance(value, (list, tuple)):
        if len(value) == 1 and isinstance(value[0], Mapping):
            return _object(value[0], (*repairs, "list_of_one"))
        return Decoded(None, repairs, "a list is not an object")
    if isinstance(value, str):
        return _plain(value, name, schema, repairs)
    return _scalar(value, name, schema, repairs)


def _object(value: Mapping[Any, Any], repairs: tuple[str, ...]) -> Decoded:
    problem = not_json(value)
    return Decoded(None, repairs, problem) if problem else Decoded(dict(value), repairs)


def _nothing(repair: str, schema: Mapping[str, Any], repairs: tuple[str, ...]) -> Decoded:
    """Null or empty arguments: no arguments for a tool that needs none, otherwise not understood."""
    required = _required(schema)
    if not required:
        return Decoded({}, (*repairs, repair))
    return Decoded(None, repairs, f"they are {repair}, but {', '.join(required)} is required")


def _plain(text: str, name: str, schema: Mapping[str, Any], repairs: tuple[str, ...]) -> Decoded:
    if problem := not_json(text):
        return Decoded(None, repairs, problem)
    key = _sole_key(name, schema)
    if key is None:
        return Decoded(None, repairs, "plain text is not an object")
    return Decoded({key: text}, (*repairs, "plain_string"))


def _scalar(value: Any, name: str, schema: Mapping[str, Any], repairs: tuple[str, ...]) -> Decoded:
    """A bare number or boolean means something only where the one parameter takes that type."""
    key = _sole_key(name, schema)
    declared = _properties(schema).get(key) if key else None
    types = declared.get("type") if isinstance(declared, Mapping) else None
    fits = {"boolean"} if isinstance(value, bool) else {"integer", "number"}
    if key and fits & set(types if isinstance(types, list) else [types]):
        return Decoded({key: value}, (*repairs, "bare_value"))
    return Decoded(None, repairs, f"a bare {type(value).__name__} is not an object")


def _sole_key(name: str, schema: Mapping[str, Any]) -> str | None:
    """The parameter that a bare value can only be meant for."""
    properties = _properties(schema)
    if name == "terminal" or "command" in properties:
        return "command"
    if "input" in properties or not properties:
        return "input"
    required = _required(schema)
    if len(required) == 1:
        return required[0]
    return next(iter(properties)) if len(properties) == 1 else None


def input_for_command(
    arguments: dict[str, Any], name: str, schema: Mapping[str, Any], repairs: list[str]
) -> dict[str, Any]:
    """`input` given where the tool wants `command`: move it, unless `input` is a parameter of its own."""
    properties = _properties(schema)
    wants_command = "command" in properties or (name == "terminal" and not properties)
    given = arguments.get("input")
    if (
        not wants_command
        or "input" in properties
        or arguments.get("command")
        or not isinstance(given, str)
        or not given
    ):
        return arguments
    repairs.append("input_for_command")
    rest = {key: value for key, value in arguments.items() if key not in ("input", "command")}
    return {"command": given, **rest}


def _loads(text: str) -> tuple[Any, tuple[str, ...], str | None]:
    """Value, repairs and problem of a JSON text; raw control characters, fences and Python literals are understood."""
    try:
        return json.loads(text, parse_constant=_refuse_constant), (), None
    except RecursionError:
        return None, (), "nested too deeply"
    except ValueError as error:
        problem = str(error)
    try:
        return json.loads(text, parse_constant=_refuse_constant, strict=False), ("control_characters",), None
    except (ValueError, RecursionError):
        pass
    if fenced := _FENCE.match(text):
        value, repairs, inner = _loads(fenced.group(1))
        return value, ("code_fence", *repairs), inner
    literal = _python_literal(text)
    return (literal, ("python_literal",), None) if literal is not None else (None, (), problem)


def _python_literal(text: str) -> dict[str, Any] | None:
    if not text.lstrip().startswith("{") or len(text) > 1_000_000:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model's odd escapes are not our warnings
            value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _looks_like_json(text: str) -> bool:
    start = text.lstrip()[:1]
    return start in {"{", "["} or _FENCE.match(text) is not None


def not_json(value: Any) -> str | None:
    """What keeps a value from being JSON that can be sent on (keys, types, NaN, unpaired surrogates), or None."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            if not all(isinstance(key, str) for key in item):
                return "object keys must be strings"
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            stack += item
        elif problem := _not_a_scalar(item):
            return problem
    return None


def _not_a_scalar(item: Any) -> str | None:
    if isinstance(item, str):
        return "text contains half of a surrogate pair" if _has_surrogate(item) else None
    if isinstance(item, float) and not math.isfinite(item):
        return "numbers must be finite"
    return None if item is None or isinstance(item, (int, float)) else f"{type(item).__name__} is not a JSON type"


def _has_surrogate(text: str) -> bool:
    if text.isascii():
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> list[str]:
    required = schema.get("required")
    return [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
