"""From a decoded JSON value to a call: which key holds the name, which the arguments, and what odd shapes mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tool_parsers.jsonread import Decoded, loads

_NAME_IN_TEXT = re.compile(r"""["'](?:name|tool_name)["']\s{0,20}:\s{0,20}["']([^"'\s<>]{1,256})["']""")
_MAX_ENCODINGS = 3


@dataclass(frozen=True)
class Keys:
    """Where a call object keeps its parts."""

    name: tuple[str, ...] = ("name", "tool_name", "function", "tool")
    arguments: tuple[str, ...] = ("arguments", "parameters", "args", "input")
    single: bool = False
    """Whether a call is `{"tool": {arguments}}` with the name as the only key."""
    arguments_required: bool = False


DEFAULT_KEYS = Keys()


@dataclass(frozen=True)
class Shape:
    """A call as its object says it; `error` tells what is missing."""

    name: str
    arguments: Any
    repairs: tuple[str, ...] = ()
    error: str | None = None


def shape_of(value: Any, keys: Keys) -> Shape:
    if not isinstance(value, Mapping):
        return Shape("", None, error="A call must be a JSON object with a name and arguments.")
    if keys.single and len(value) == 1 and not any(isinstance(value.get(key), str) for key in keys.name):
        ((name, arguments),) = value.items()
        return _with_arguments(name, arguments)
    inner = value.get("function")
    if isinstance(inner, Mapping):
        value = inner
    name = next((value[key] for key in keys.name if isinstance(value.get(key), str)), "")
    if not name:
        return Shape("", None, error='A call needs a name: write {"name": ..., "arguments": {...}}.')
    present = next((key for key in keys.arguments if key in value), None)
    if present is None and keys.arguments_required:
        return Shape(name, None, error=f"The call `{name}` has no arguments: write them as one JSON object.")
    return _with_arguments(name, value[present] if present else {})


def _with_arguments(name: str, arguments: Any) -> Shape:
    repairs: tuple[str, ...] = ()
    for _ in range(_MAX_ENCODINGS):
        if not isinstance(arguments, str):
            break
        if not arguments.strip():
            return Shape(name, {}, ("string_arguments",))
        outcome = loads(arguments)
        if not isinstance(outcome, Decoded):
            error = f"The arguments of `{name}` are a string that is not JSON ({outcome.message}): write an object."
            return Shape(name, None, repairs, error)
        arguments, repairs = outcome.value, (*repairs, "string_arguments", *outcome.repairs)
    return Shape(name, {} if arguments is None else arguments, repairs)


def name_in(raw: str) -> str:
    """The name in the text of a broken call object, or ''."""
    match = _NAME_IN_TEXT.search(raw[:4096])
    return match.group(1) if match else ""
