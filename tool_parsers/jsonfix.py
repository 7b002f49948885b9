"""Rewrites almost-JSON into JSON, noting each class of repair; one pass, linear in the window it is given.

It only rewrites; whether the outcome is JSON is for the strict decoder to say. NaN and Infinity are never repaired.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field

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
