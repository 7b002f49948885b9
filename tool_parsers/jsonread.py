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
from dataclasses import dataclass, field
from typing import Any

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


_TOKEN = re.compile(
    r"""(?P<blank>\s++)|(?P<string>"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')|(?P<mark>[{}\[\],:])|(?P<word>[^\s{}\[\],:"']++)""",
    re.DOTALL,
)
_STRUCTURE = re.compile(r"\s*+(?:[,:}\]]|\Z)")
_NOT_IN_STRING = re.compile(r"[{}\[\]\n]")
_ESCAPE = re.compile(
    r"\\(u[0-9a-fA-F]{4}|U000[0-9a-fA-F]{5}|U0010[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)|\"|[\x00-\x1f]", re.DOTALL
)
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSER = {"{": "}", "[": "]"}
MAX_DEPTH = 100


@dataclass
class Fixed:
    """The rewritten text, or why there is none."""

    text: str = ""
    end: int = 0
    repairs: list[str] = field(default_factory=list)
    unclosed: int = 0
    """Closing brackets that had to be added at the end."""
    last: str = ""
    """The last token before the end: tells a value cut short from one that only lacks brackets."""
    open_string: bool = False
    hopeless: bool = False


class _Fixer:
    def __init__(self, window: str) -> None:
        self.window = window
        self.out: list[str] = []
        self.open: list[str] = []
        self.fixed = Fixed()

    def run(self) -> Fixed:
        """Rewrite token by token until the value is closed or the window ends."""
        at = 0
        while at < len(self.window):
            token = _TOKEN.match(self.window, at)
            if token is None:
                self.fixed.open_string = True
                return self.fixed
            at = token.end()
            kind = token.lastgroup
            if kind == "string":
                at = self._string(token)
            elif kind == "mark":
                if self._mark(token.group(), at):
                    break
            elif kind == "word":
                self._word(token.group(), at)
            if self.fixed.hopeless or self.fixed.open_string:
                return self.fixed
        self._finish(at)
        return self.fixed

    def _note(self, repair: str) -> None:
        if repair not in self.fixed.repairs:
            self.fixed.repairs.append(repair)

    def _string(self, token: re.Match[str]) -> int:
        """Take a string, past any quotes inside it that no structure follows; returns its end."""
        quote, end = token.group()[0], token.end()
        while not _STRUCTURE.match(self.window, end):
            again = self.window.find(quote, end)
            # Brackets or a line's end between the quotes mean that the string was over and something else is wrong.
            if again < 0 or _NOT_IN_STRING.search(self.window, end, again):
                self.fixed.hopeless = True
                return end
            end = again + 1
            self._note("inner_quotes")
        if quote == "'":
            self._note("single_quotes")
        escape = self._python_escape if quote == "'" else self._escape
        self.out.append('"' + _ESCAPE.sub(escape, self.window[token.start() + 1 : end - 1]) + '"')
        return end

    def _python_escape(self, match: re.Match[str]) -> str:
        """Single quotes mean Python wrote it: its escapes for characters count there."""
        found = match.group()
        if len(found) in (4, 10):
            return json.dumps(chr(int(found[2:], 16)))[1:-1]
        return self._escape(match)

    def _escape(self, match: re.Match[str]) -> str:
        found = match.group()
        if found == '"':
            return '\\"'
        if len(found) == 1:
            self._note("raw_newline")
            return found
        letter = found[1]
        if len(found) == 6 or letter in '"\\/bfnrt':
            return found
        self._note("bad_escape")
        if letter == "'":
            return "'"
        if len(found) > 2:
            return "\\" + found
        # A backslash before a real newline continues the line in Python and shells: keep both characters.
        return "\\\\" + letter

    def _mark(self, mark: str, at: int) -> bool:
        """Take one bracket, comma or colon; True when it closed the value."""
        if mark in "{[":
            self.open.append(_CLOSER[mark])
            self.fixed.hopeless = len(self.open) > MAX_DEPTH
        elif mark in "}]":
            return self._close(mark, at)
        self.out.append(mark)
        return False

    def _close(self, mark: str, at: int) -> bool:
        self._drop_comma()
        if mark not in self.open:
            self._note("extra_bracket")
            return False
        while self.open[-1] != mark:
            self._note("missing_bracket")
            self.out.append(self.open.pop())
        self.open.pop()
        self.out.append(mark)
        self.fixed.end = at
        return not self.open

    def _word(self, word: str, at: int) -> None:
        after = _STRUCTURE.match(self.window, at)
        if after and after.group().endswith(":"):
            self._note("unquoted_key")
            self.out.append('"' + word.replace("\\", "\\\\") + '"')
            return
        if word in _PYTHON_WORDS:
            self._note("python_literal")
        self.out.append(_PYTHON_WORDS.get(word, word))

    def _drop_comma(self) -> None:
        if self.out and self.out[-1] == ",":
            self.out.pop()
            self._note("trailing_comma")

    def _finish(self, at: int) -> None:
        self.fixed.last = self.out[-1] if self.out else ""
        if self.open:
            self._drop_comma()
            self.fixed.unclosed = len(self.open)
            self._note("missing_bracket")
            self.out.extend(reversed(self.open))
            self.fixed.end = at
        self.fixed.text = "".join(self.out)


def fix(window: str) -> Fixed:
    """Rewrite the almost-JSON object or array that begins the window."""
    return _Fixer(window).run()
