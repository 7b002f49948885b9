"""Reads Python-like literals and calls from text: strings, numbers, names of constants, lists, dicts, keyword calls.

A tokenizer of its own rather than `ast`: it knows where it stopped, takes JSON's constants, raw newlines in strings and
keywords that are reserved words, and never recurses deeper than a fixed bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

_BLANK = re.compile(r"\s*+")
_NAME = re.compile(r"[A-Za-z_][\w.\-]{0,255}+")
_NUMBER = re.compile(
    r"[+-]?(?:0[xX][0-9a-fA-F]{1,64}|\d[\d_]{0,400}(?:\.\d*)?(?:[eE][+-]?\d{1,4})?|\.\d{1,400}(?:[eE][+-]?\d{1,4})?)"
)
_STRING = re.compile(
    r'"""(?:[^\\"]|\\.|"(?!""))*+"""|\'\'\'(?:[^\\\']|\\.|\'(?!\'\'))*+\'\'\'|"(?:[^"\\]|\\.)*+"|\'(?:[^\'\\]|\\.)*+\'',
    re.DOTALL,
)
_PREFIX = re.compile(r"[rRbBuUfF]{1,2}(?=[\"'])")
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|\n|.)", re.DOTALL)
_SIMPLE = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "a": "\a",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_EMPTY = re.compile(r"(set|list|tuple|dict)\(\s{0,8}\)")
_CONSTANTS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_AFTER_VALUE = re.compile(r"\s*+(?:[,)\]}:]|\Z)")
_NEXT_KEYWORD = re.compile(r",\s*+(?:[A-Za-z_][\w.\-]{0,255}+\s{0,20}+[=:]|[)\]]|\Z)")
_MAX_DEPTH = 60
_MAX_INNER_QUOTES = 16
"""A bound on guessing: keeps a run of unclosed strings linear."""

_SIMPLE_KEYWORD = re.compile(
    r"""([A-Za-z_]\w{0,255}+)=(?:(-?(?:0|[1-9]\d{0,17}+))|"([^"\\\n]*+)"|'([^'\\\n]*+)'|(True|False|None|true|false|null))"""
    r"(?:,\s*+|(?=\)))"
)
"""The plain keyword, taken in one step; everything else goes the long way with the same outcome."""


def _simple_value(match: re.Match[str]) -> Any:
    number, double, single, constant = match.group(2, 3, 4, 5)
    if number is not None:
        return int(number)
    if constant is not None:
        return _CONSTANTS[constant]
    return double if double is not None else single


class PythonFault(ValueError):
    """The text is not a literal; `at` is where, `cut` whether it simply ended."""

    def __init__(self, message: str, at: int, cut: bool = False) -> None:
        super().__init__(message)
        self.at = at
        self.cut = cut


@dataclass
class PythonReader:
    """A cursor over one stretch of text."""

    raw: str
    place: int
    end: int
    repairs: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    """The closing brackets still to come, innermost last."""
    in_call: bool = False
    """Whether the outermost of them closes a call, where only keywords follow a comma."""

    def peek(self) -> str:
        """The next non-blank character ('' at the end)."""
        match = _BLANK.match(self.raw, self.place, self.end)
        self.place = match.end() if match else self.place
        return self.raw[self.place] if self.place < self.end else ""

    def take(self, mark: str) -> None:
        """Take one expected character."""
        if self.peek() != mark:
            raise self._fault(f"expected {mark!r}")
        self.place += 1

    def name(self) -> str:
        """Take a (dotted) name."""
        self.peek()
        match = _NAME.match(self.raw, self.place, self.end)
        if match is None:
            raise self._fault("expected a name")
        self.place = match.end()
        return match.group()

    def keywords(self) -> dict[str, Any]:
        """Take `(key=value, ...)`."""
        self.take("(")
        self.open.append(")")
        self.in_call = True
        arguments: dict[str, Any] = {}
        while self.peek() != ")":
            if self._simple_keywords(arguments):
                continue
            key = self.name()
            if self.peek() == ":":
                self.place += 1
                self.repairs.append("colon_for_equals")
            else:
                self.take("=")
            arguments[key] = self.value()
            if self.peek() == ",":
                self.place += 1
            elif self.peek() != ")":
                raise self._fault("expected ',' or ')'")
        self._close()
        return arguments

    def _close(self) -> None:
        self.place += 1
        self.open.pop()

    def _simple_keywords(self, arguments: dict[str, Any]) -> bool:
        """Take the plain keywords that come next; whether there were any."""
        begin = self.place
        while (simple := _SIMPLE_KEYWORD.match(self.raw, self.place, self.end)) is not None:
            arguments[simple.group(1)] = _simple_value(simple)
            self.place = simple.end()
        return self.place > begin

    def value(self, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            raise PythonFault("nested too deeply", self.place)
        first = self.peek()
        if first in ("[", "("):
            return self._list("]" if first == "[" else ")", depth)
        if first == "{":
            return self._dict(depth)
        if first in ("'", '"') or (first and _PREFIX.match(self.raw, self.place, self.end)):
            return self._string()
        return self._scalar()

    def _list(self, closer: str, depth: int) -> list[Any]:
        self.place += 1
        self.open.append(closer)
        return self._items(closer, depth)

    def _items(self, closer: str, depth: int) -> list[Any]:
        items: list[Any] = []
        while self.peek() != closer:
            items.append(self.value(depth + 1))
            if self.peek() == ",":
                self.place += 1
            elif self.peek() != closer:
                raise self._fault(f"expected ',' or {closer!r}")
        self._close()
        return items

    def _dict(self, depth: int) -> dict[str, Any] | list[Any]:
        """Take a dict, or a set as a list: JSON has no sets."""
        self.place += 1
        self.open.append("}")
        items: dict[str, Any] = {}
        while self.peek() != "}":
            key = self.value(depth + 1)
            if not items and self.peek() in (",", "}"):
                self.place += self.raw[self.place] == ","
                return [key, *self._items("}", depth)]
            self.take(":")
            items[key if isinstance(key, str) else str(key)] = self.value(depth + 1)
            if self.peek() == ",":
                self.place += 1
            elif self.peek() != "}":
                raise self._fault("expected ',' or '}'")
        self._close()
        return items

    def _scalar(self) -> Any:
        number = _NUMBER.match(self.raw, self.place, self.end)
        if number is not None and not self.raw[number.end() : number.end() + 1].isalnum():
            self.place = number.end()
            return self._number(number.group())
        empty = _EMPTY.match(self.raw, self.place, self.end)
        if empty is not None:
            self.place = empty.end()
            return {} if empty.group(1) == "dict" else []
        match = _NAME.match(self.raw, self.place, self.end)
        if match is None or match.group() not in _CONSTANTS:
            raise self._fault("expected a value")
        self.place = match.end()
        return _CONSTANTS[match.group()]

    def _number(self, text: str) -> int | float:
        digits = text.replace("_", "")
        if "x" in digits.lower():
            return int(digits, 16)
        if any(mark in digits for mark in ".eE"):
            number = float(digits)
            if number in (float("inf"), float("-inf")):
                raise PythonFault("a number is too large", self.place)
            return number
        if len(digits.lstrip("+-")) > 1 and digits.lstrip("+-").startswith("0"):
            self.repairs.append("leading_zero")
        return int(digits)

    def _string(self) -> str:
        prefix = _PREFIX.match(self.raw, self.place, self.end)
        if prefix is not None:
            self.place = prefix.end()
        quote = self.raw[self.place]
        match = _STRING.match(self.raw, self.place, self.end)
        if match is None:
            raise PythonFault("a string has no end", self.place, cut=True)
        triple = match.group().startswith(quote * 3) and len(match.group()) >= 6
        size = 3 if triple else 1
        begin, end = self.place + size, match.end() - size
        if not triple:
            end = self._end_of_string(quote, end)
        self.place = end + size
        body = self.raw[begin:end]
        if not triple and "\n" in body:
            self.repairs.append("raw_newline")
        if prefix is not None and "r" in prefix.group().lower():
            return body
        return _ESCAPE.sub(_unescaped, body) if "\\" in body else body

    def _end_of_string(self, quote: str, first: int) -> int:
        """The quote that ends a string which may quote others unescaped: the one with the right brackets after it."""
        end, plausible = first, -1
        for inner in range(_MAX_INNER_QUOTES + 1):
            if _AFTER_VALUE.match(self.raw, end + 1, self.end):
                plausible = end if plausible < 0 else plausible
                if self._brackets_close(end + 1):
                    plausible = end
                    break
            end = self.raw.find(quote, end + 1, self.end) if inner < _MAX_INNER_QUOTES else -1
            if end < 0:
                break
        if plausible < 0:
            raise PythonFault("a string has no end", self.place, cut=True)
        if plausible > first:
            self.repairs.append("inner_quotes")
        return plausible

    def _brackets_close(self, place: int) -> bool:
        """Whether the closing brackets from here on are those still open; the list around calls has one more."""
        for level, expected in enumerate((*reversed(self.open), "]"), 1):
            match = _BLANK.match(self.raw, place, self.end)
            place = match.end() if match else place
            following = self.raw[place : place + 1] if place < self.end else ""
            if following == "," and self.in_call and level == len(self.open):
                return _NEXT_KEYWORD.match(self.raw, place, self.end) is not None
            if not following or following not in ")]}":
                return following not in ("'", '"')
            if following != expected:
                return False
            place += 1
        return True

    def _fault(self, message: str) -> PythonFault:
        return PythonFault(message, self.place, self.peek() == "")


def _unescaped(match: re.Match[str]) -> str:
    letter = match.group(1)
    if letter in _SIMPLE:
        return _SIMPLE[letter]
    if letter[0] in "xuU" and len(letter) > 1:
        code = int(letter[1:], 16)
        return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else "�"
    if letter[0] in "01234567":
        return chr(int(letter, 8))
    # Python keeps an unknown escape as it stands.
    return match.group()


def python_value(raw: str) -> Any:
    """The whole text as one Python literal, or None."""
    reader = PythonReader(raw, 0, len(raw))
    try:
        value = reader.value()
    except PythonFault:
        return None
    return value if reader.peek() == "" and not reader.repairs else None
