"""Tool arguments as the model wrote them -> a dict that fits the tool's schema, or a sentence the model can act on.

Promises: never raises; never runs `{}` in place of what was meant; whatever had to be changed is named in `repairs`,
and `schema_valid` is true only when nothing was. Normalizing the result again changes nothing.
Forms are understood in `argument_forms.py`, values are coerced in `argument_values.py`; here they meet the schema.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import orjson
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

from agent_loop.argument_forms import Decoded, decode, input_for_command, not_json
from agent_loop.argument_values import coerce

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
