"""Reads one JSON value at a place in the text: strictly first, then with recorded repairs.

The value ends where the decoder says, so closing tags inside strings and text after the value are harmless. Work is
linear over all calls of a text: a strict reading can only pass the next call's opener inside a string, so at most two
readings ever cross the same stretch, and repairs see a few windows bounded by the next markers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tool_parsers.jsonfix import MAX_DEPTH, fix
from tool_parsers.text import Text, without_lone_surrogates

_FIRST_WINDOW = 512
_NEAR_END = 12
"""A fault this close to the end of a window may be the window's doing: look again with a larger one."""
_COMPLETE_ENDS = ("}", "]")
_OPEN_ENDS = ("{", "[", ",", ":", "")
_ESCAPED_OBJECT = re.compile(r"\{\s*+(?:\\n)*+\\\"")
_SUSPECT = re.compile(r"\\u[dD]|\d[eE]\+?\d{3}|\d{300}")
"""Text whose value must be looked through for lone surrogates or infinities; the rest is spared the walk."""


@dataclass(frozen=True)
class Decoded:
    """A value, where it ends, and what had to be repaired."""

    value: Any
    end: int
    repairs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fault:
    """Why there is no value, where reading stopped, and whether the text was simply cut off."""

    message: str
    at: int
    cut: bool = False


class _Refused(ValueError):
    """Valid syntax that must not be accepted (NaN, too deep)."""


def _refuse_constant(word: str) -> Any:
    raise _Refused(f"{word} is not a JSON value")


_STRICT = json.JSONDecoder(parse_constant=_refuse_constant)
_LENIENT = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)


def decode(text: Text, start: int, stops: tuple[str, ...] = (), limit: int | None = None) -> Decoded | Fault:
    """Read the object or array at `start`; `stops` are the markers that may end it when it is malformed."""
    limit = text.length if limit is None else limit
    outcome = _read_strictly(text.raw, start, limit)
    if isinstance(outcome, Decoded) or outcome.message.endswith(("is not a JSON value", "nested too deeply")):
        return outcome
    return _repair(text, start, stops, limit, outcome)


def decode_strictly(text: Text, start: int) -> Decoded | Fault:
    """Read the value at `start` without any repair but raw control characters."""
    return _read_strictly(text.raw, start, text.length)


def loads(raw: str) -> Decoded | Fault:
    """Read a whole string as one value; trailing text is a fault."""
    text = Text(raw)
    start = text.skip_blanks(0)
    outcome = (
        decode(text, start) if raw[start : start + 1] in ("{", "[") else _read_strictly(text.raw, start, text.length)
    )
    if isinstance(outcome, Decoded) and text.skip_blanks(outcome.end) < text.length:
        return Fault("extra text after the value", outcome.end)
    return outcome


def _read_strictly(raw: str, start: int, limit: int) -> Decoded | Fault:
    size = _FIRST_WINDOW
    decoder, repairs = _STRICT, ()  # type: tuple[json.JSONDecoder, tuple[str, ...]]
    while True:
        window = raw[start : min(start + size, limit)]
        cut = start + size >= limit
        try:
            value, end = decoder.raw_decode(window)
            if _SUSPECT.search(window, 0, end) or window.count("[", 0, end) + window.count("{", 0, end) > MAX_DEPTH:
                value, extra = _clean(value)
                repairs += extra
            return Decoded(value, start + end, repairs)
        except json.JSONDecodeError as error:
            if error.msg.startswith("Invalid control character") and decoder is _STRICT:
                decoder, repairs = _LENIENT, ("raw_newline",)
                continue
            open_end = error.msg.startswith("Unterminated") or error.pos >= len(window) - _NEAR_END
            if cut or not open_end:
                return Fault(_reason(error), start + error.pos, cut and open_end)
        except (_Refused, RecursionError) as error:
            if isinstance(error, _Refused):
                return Fault(str(error), start)
            return Fault("nested too deeply", start + len(window))
        except ValueError:
            # int() refuses numbers of thousands of digits.
            return Fault("a number is too long", start)
        size *= 4


def _reason(error: json.JSONDecodeError) -> str:
    return error.msg[0].lower() + error.msg[1:]


def _repair(text: Text, start: int, stops: tuple[str, ...], limit: int, fault: Fault) -> Decoded | Fault:
    if _ESCAPED_OBJECT.match(text.raw, start, limit):
        return _unescape(text, start, stops, limit, fault)
    for stop in _window_ends(text, start, stops, limit, fault.at):
        fixed = fix(text.raw[start:stop])
        if fixed.open_string:
            continue
        closed_by_marker = stop < limit and fixed.last not in _OPEN_ENDS
        whole = not fixed.unclosed or closed_by_marker or fixed.last in _COMPLETE_ENDS
        if fixed.hopeless or not whole:
            break
        outcome = _read_strictly(fixed.text, 0, len(fixed.text))
        if isinstance(outcome, Decoded):
            return Decoded(outcome.value, start + fixed.end, _merged(tuple(fixed.repairs), outcome.repairs))
        if outcome.message.endswith("is not a JSON value"):
            return Fault(outcome.message, fault.at)
        break
    return fault


def _unescape(text: Text, start: int, stops: tuple[str, ...], limit: int, fault: Fault) -> Decoded | Fault:
    """JSON that was escaped once more than it should be, without the quotes around it."""
    stop, _ = text.first(stops, start)
    stop = stop if 0 <= stop < limit else limit
    once = _read_strictly('"' + text.raw[start:stop].strip() + '"', 0, stop - start + 2)
    inner = _read_strictly(once.value, 0, len(once.value)) if isinstance(once, Decoded) else once
    return Decoded(inner.value, stop, ("escaped_json",)) if isinstance(inner, Decoded) else fault


def _window_ends(text: Text, start: int, stops: tuple[str, ...], limit: int, fault_at: int) -> list[int]:
    """Where a malformed value may end: the next two markers, and the two after the strict decoder's fault."""
    ends: list[int] = []
    for origin in (start + 1, max(fault_at, start + 1)):
        place = origin
        for _ in range(2):
            found, marker = text.first(stops, place)
            if found < 0 or found >= limit:
                ends.append(limit)
                break
            ends.append(found)
            place = found + len(marker)
    return sorted(set(ends))


def _merged(first: tuple[str, ...], second: tuple[str, ...]) -> tuple[str, ...]:
    return first + tuple(repair for repair in second if repair not in first)


def _clean(value: Any) -> tuple[Any, tuple[str, ...]]:
    """Replace lone surrogates; refuse infinities and bottomless nesting."""
    repairs: list[str] = []

    def walk(item: Any, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise _Refused("nested too deeply")
        return _WALKERS.get(type(item), _keep)(item, depth, walk, repairs)

    cleaned = walk(value, 0)
    return cleaned, tuple(repairs)


Walk = Callable[[Any, int], Any]


def _keep(item: Any, _depth: int, _walk: Walk, _repairs: list[str]) -> Any:
    return item


def _clean_text(item: str, _depth: int, _walk: Walk, repairs: list[str]) -> str:
    cleaned = item if item.isascii() else without_lone_surrogates(item)
    if cleaned is not item and cleaned != item and "lone_surrogate" not in repairs:
        repairs.append("lone_surrogate")
    return cleaned


def _clean_number(item: float, _depth: int, _walk: Walk, _repairs: list[str]) -> float:
    if not math.isfinite(item):
        raise _Refused("a number too large for JSON is not a JSON value")
    return item


def _clean_list(item: list[Any], depth: int, walk: Walk, _repairs: list[str]) -> list[Any]:
    return [walk(element, depth + 1) for element in item]


def _clean_dict(item: dict[str, Any], depth: int, walk: Walk, repairs: list[str]) -> dict[str, Any]:
    return {_clean_text(key, depth, walk, repairs): walk(element, depth + 1) for key, element in item.items()}


_WALKERS: dict[type, Callable[[Any, int, Walk, list[str]], Any]] = {
    str: _clean_text,
    float: _clean_number,
    list: _clean_list,
    dict: _clean_dict,
}
