"""Tool arguments as the model wrote them -> a dict that fits the tool's schema, or a sentence the model can act on.

Promises: never raises; never runs `{}` in place of what was meant; whatever had to be changed is named in `repairs`,
and `schema_valid` is true only when nothing was. Normalizing the result again changes nothing. Broken JSON is never
completed or guessed: half a command must not run.
"""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import orjson
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

from tool_parsers.schema import items_of, sole_parameter

MAX_PROBLEMS = 3
"""Schema violations named in one error; more would not help the model."""
MAX_ENCODINGS = 4
"""JSON inside JSON strings is followed this deep."""

_FENCE = re.compile(r"\A\s*```(?:json)?[ \t]*\n(.*)\n[ \t]*```\s*\Z", re.DOTALL)
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
    problem = not_json(coerced) or validator(schema)(_without_defaults(coerced, schema))
    changes = tuple(dict.fromkeys(repairs))
    if problem is not None:
        return Normalized(None, changes, f"Invalid arguments for {name}: {problem}")
    return Normalized(coerced, changes)


def _without_defaults(arguments: dict[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that are to be checked: the default that the schema itself names fits, whatever its type is."""
    properties, required = _properties(schema), _required(schema)
    return {
        key: value for key, value in arguments.items() if key in required or not _is_default(value, properties.get(key))
    }


def _is_default(value: Any, schema: Any) -> bool:
    if not isinstance(schema, Mapping) or "default" not in schema:
        return False
    return type(value) is type(schema["default"]) and value == schema["default"]


def _explain(decoded: Normalized, name: str, schema: Mapping[str, Any]) -> str:
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
    schema = _choices_of_items(orjson.loads(schema_json))
    if schema in ({}, {"type": "object"}):
        return _accept
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError:
        return _accept  # a broken schema cannot refuse anything; the tool itself still can
    # An empty registry: a `$ref` to some address must never become a network request.
    checker = Draft202012Validator(schema, registry=Registry())
    return _checking(checker.iter_errors)


def _choices_of_items(schema: Any) -> Any:
    """The schema with each `enum` of an array that names no array moved to its items: no list could ever fit it."""
    if isinstance(schema, list):
        return [_choices_of_items(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _choices_of_items(value) for key, value in schema.items()}
    choices, items = schema.get("enum"), schema.get("items", {})
    if schema.get("type") != "array" or not isinstance(choices, list) or not isinstance(items, dict):
        return schema
    if "enum" in items or any(isinstance(choice, list) for choice in choices):
        return schema
    rest = {key: value for key, value in schema.items() if key != "enum"}
    return {**rest, "items": {**items, "enum": choices}}


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


def decode(raw: Any, name: str, schema: Mapping[str, Any]) -> Normalized:
    """Understand the form of raw arguments: object, JSON text, text in text, plain text, null, lists, numbers.

    JSON text that holds an object is the normal form and not a repair. An error is a phrase here, without a full stop.
    """
    if isinstance(raw, str):
        return _decode_text(raw, name, schema)
    return _decode_value(raw, name, schema, ())


def _decode_text(text: str, name: str, schema: Mapping[str, Any]) -> Normalized:
    repairs: tuple[str, ...] = ()
    value: Any = text
    for depth in range(MAX_ENCODINGS):
        if not value.strip():
            return _nothing("empty", schema, repairs)
        parsed, repair, problem = _loads(value)
        if problem is not None:
            if _looks_like_json(value):
                return Normalized(None, repairs, f"not valid JSON ({problem})")
            return _plain(value, name, schema, repairs)
        repairs += repair
        if not isinstance(parsed, str):
            return _decode_value(parsed, name, schema, repairs)
        value = parsed
        if depth == 0:
            repairs += ("double_encoded",)
    return Normalized(None, repairs, "JSON text nested in JSON text too deeply")


def _decode_value(value: Any, name: str, schema: Mapping[str, Any], repairs: tuple[str, ...]) -> Normalized:
    if isinstance(value, Mapping):
        return _object(value, repairs)
    if value is None:
        return _nothing("null", schema, repairs)
    if isinstance(value, (list, tuple)):
        if len(value) == 1 and isinstance(value[0], Mapping):
            return _object(value[0], (*repairs, "list_of_one"))
        return Normalized(None, repairs, "a list is not an object")
    if isinstance(value, str):
        return _plain(value, name, schema, repairs)
    return _scalar(value, name, schema, repairs)


def _object(value: Mapping[Any, Any], repairs: tuple[str, ...]) -> Normalized:
    problem = not_json(value)
    return Normalized(None, repairs, problem) if problem else Normalized(dict(value), repairs)


def _nothing(repair: str, schema: Mapping[str, Any], repairs: tuple[str, ...]) -> Normalized:
    """Null or empty arguments: no arguments for a tool that needs none, otherwise not understood."""
    required = _required(schema)
    if not required:
        return Normalized({}, (*repairs, repair))
    return Normalized(None, repairs, f"they are {repair}, but {', '.join(required)} is required")


def _plain(text: str, name: str, schema: Mapping[str, Any], repairs: tuple[str, ...]) -> Normalized:
    if problem := not_json(text):
        return Normalized(None, repairs, problem)
    key = _sole_key(name, schema)
    if key is None:
        return Normalized(None, repairs, "plain text is not an object")
    return Normalized({key: text}, (*repairs, "plain_string"))


def _scalar(value: Any, name: str, schema: Mapping[str, Any], repairs: tuple[str, ...]) -> Normalized:
    """A bare number or boolean means something only where the one parameter takes that type."""
    key = _sole_key(name, schema)
    declared = _properties(schema).get(key) if key else None
    types = declared.get("type") if isinstance(declared, Mapping) else None
    fits = {"boolean"} if isinstance(value, bool) else {"integer", "number"}
    if key and fits & set(types if isinstance(types, list) else [types]):
        return Normalized({key: value}, (*repairs, "bare_value"))
    return Normalized(None, repairs, f"a bare {type(value).__name__} is not an object")


def _sole_key(name: str, schema: Mapping[str, Any]) -> str | None:
    """The parameter that a bare value can only be meant for."""
    if name == "terminal":
        return "command"
    return sole_parameter(schema) or (None if _properties(schema) else "input")


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


def coerce(value: Any, schema: Any, repairs: list[str]) -> Any:
    """The value, coerced to the schema's type where that is harmless; appends to `repairs` what it did."""
    if not isinstance(schema, Mapping):
        return value
    types = _types(schema)
    if types and not _fits(value, types):
        value = _convert(value, types, repairs)
        if types == ("array",):
            value = _wrapped(value, items_of(schema), repairs)
    elif isinstance(value, float) and "integer" in types and "number" not in types:
        repairs.append("integral_float")
        value = int(value)
    value = _as_listed(value, schema.get("enum"), repairs)
    if isinstance(value, dict):
        return _coerce_object(value, schema, repairs)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        return [coerce(item, schema["items"], repairs) for item in value]
    return value


def _as_listed(value: Any, choices: Any, repairs: list[str]) -> Any:
    """The one choice that differs from the value only in its case, or in being the text of a boolean."""
    if not isinstance(value, (str, bool)) or not isinstance(choices, list) or value in choices:
        return value
    meant = str(value).casefold()
    fitting = [choice for choice in choices if isinstance(choice, str) and choice.casefold() == meant]
    if len(fitting) != 1:
        return value
    repairs.append("enum_spelling")
    return fitting[0]


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
        if key not in required and _is_default(item, properties[key]):
            result[key] = item
            continue
        types = _types(properties[key])
        if item is None and types and "null" not in types and key not in required:
            repairs.append("null_dropped")
            continue
        result[key] = coerce(item, properties[key], repairs)
    return result


def _types(schema: Any) -> tuple[str, ...]:
    """The declared types; through `anyOf`/`oneOf` as pydantic writes optional fields; () when that is unclear."""
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


def _wrapped(value: Any, items: Any, repairs: list[str]) -> Any:
    """A bare value where a list is wanted, as a list of one; left alone when it is no such item, or half a list."""
    if value is None or isinstance(value, list) or (isinstance(value, str) and value.lstrip()[:1] in ("", "[")):
        return value
    wanted = _types(items)
    if wanted and not _fits(coerce(value, items, []), wanted):
        return value
    repairs.append("wrapped_in_array")
    return [value]


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
