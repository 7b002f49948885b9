"""Grammar H: Gemma's own literal, and the reader for it (response templates use it too)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tool_parsers.schema import json_or_text, typed, types_of
from tool_parsers.spec import Format, Reading, Reasoning, Scan

_BARE = re.compile(r"[^,{}\[\]]*+")
_KEY = re.compile(r"\s*+([^\s:,{}\[\]<]{1,256})\s{0,20}+:")
_QUOTED_KEY = re.compile(r"\s{0,20}+:")
_SIMPLE_PAIR = re.compile(r"([A-Za-z_]\w{0,255}+):(-?(?:0|[1-9]\d{0,17}+))(?:,|(?=\}))")
"""The plainest pair, taken in one step; everything else goes the long way with the same outcome."""
_MAX_DEPTH = 60


class _LiteralFault(ValueError):
    """The text is not a literal; `cut` tells whether it simply ended."""

    def __init__(self, message: str, cut: bool) -> None:
        super().__init__(message)
        self.cut = cut


@dataclass
class _Cursor:
    scan: Scan
    place: int
    quote: str

    def peek(self) -> str:
        """The next non-blank character ('' at the end)."""
        self.place = min(self.scan.text.skip_blanks(self.place), self.scan.end)
        return self.scan.text.raw[self.place] if self.place < self.scan.end else ""

    def value(self, schema: Any, depth: int = 0) -> Any:
        """Take one value."""
        if depth > _MAX_DEPTH:
            raise _LiteralFault("nested too deeply", False)
        first = self.peek()
        if first == "{":
            return self.object({}, depth)
        if first == "[":
            return self._list(depth)
        if self.scan.text.at(self.quote, self.place):
            return self._string()
        return self._bare(schema)

    def object(self, properties: Any, depth: int) -> dict[str, Any]:
        """Take `{key:value, ...}`."""
        self.place += 1
        found: dict[str, Any] = {}
        while self.peek() != "}":
            if self._simple_pairs(found, properties):
                continue
            key = self._key()
            found[key] = self.value(properties.get(key), depth + 1)
            self._separator("}")
        self.place += 1
        return found

    def _simple_pairs(self, found: dict[str, Any], properties: Any) -> bool:
        """Take the plain pairs that come next; whether there were any."""
        raw, begin = self.scan.text.raw, self.place
        while (pair := _SIMPLE_PAIR.match(raw, self.place, self.scan.end)) is not None:
            if pair.group(1) in properties:
                break
            found[pair.group(1)] = int(pair.group(2))
            self.place = pair.end()
        return self.place > begin

    def _list(self, depth: int) -> list[Any]:
        self.place += 1
        found: list[Any] = []
        while self.peek() != "]":
            found.append(self.value(None, depth + 1))
            self._separator("]")
        self.place += 1
        return found

    def _separator(self, closer: str) -> None:
        mark = self.peek()
        if mark == ",":
            self.place += 1
        elif mark != closer:
            raise _LiteralFault(f"expected ',' or {closer!r}", mark == "")

    def _key(self) -> str:
        raw = self.scan.text.raw
        if self.scan.text.at(self.quote, self.place):
            key = self._string()
            match = _QUOTED_KEY.match(raw, self.place, self.scan.end)
        else:
            match = _KEY.match(raw, self.place, self.scan.end)
            key = match.group(1).strip('"') if match else ""
        if match is None:
            raise _LiteralFault("expected a key and ':'", self.scan.find(":", self.place) < 0)
        self.place = match.end()
        return key

    def _string(self) -> str:
        begin = self.place + len(self.quote)
        end = self.scan.find(self.quote, begin)
        if end < 0:
            raise _LiteralFault("a string has no end", True)
        self.place = end + len(self.quote)
        return self.scan.text.raw[begin:end]

    def _bare(self, schema: Any) -> Any:
        match = _BARE.match(self.scan.text.raw, self.place, self.scan.end)
        text = match.group() if match else ""
        self.place += len(text)
        if self.place >= self.scan.end:
            raise _LiteralFault("the text ended inside a value", True)
        text = text.strip()
        allowed = types_of(schema)
        if text == "None" and allowed != {"string"}:
            # Gemma's template prints null so.
            return None
        if allowed:
            return typed(text, schema)
        return json_or_text(text)


@dataclass(frozen=True)
class Literal:
    """`OPENER call:NAME{...} CLOSER`."""

    opener: str
    closer: str
    quote: str
    header: re.Pattern[str] = re.compile(r"\s*+(?:call)?:?\s{0,20}+([^\s{}<>]{1,256})\s{0,20}+(?=\{)")
    bare_header: re.Pattern[str] | None = None
    """Calls without opener, where models are known to drop it."""

    def find(self, scan: Scan, start: int) -> int:
        place = scan.find(self.opener, start)
        if self.bare_header is not None:
            match = scan.text.search(self.bare_header, start)
            if match is not None and match.start() < scan.end and (place < 0 or match.start() < place):
                return match.start()
        return place

    def read(self, scan: Scan, start: int) -> Reading | None:
        opener = self.opener if scan.text.at(self.opener, start) else ""
        header = self.header.match(scan.text.raw, start + len(opener), scan.end)
        if header is None:
            end = self._region_end(scan, start + max(len(opener), 1))
            return Reading(end, errors=[scan.malformed("A call began but names no function.", (start, end))])
        name = header.group(1).removeprefix("call:").lstrip(":")
        return self.read_named(scan, start, name, header.end())

    def read_named(self, scan: Scan, start: int, name: str, inside: int) -> Reading:
        """Read the arguments of a call whose name is known; they begin at `inside`."""
        cursor = _Cursor(scan, inside, self.quote)
        try:
            if cursor.peek() != "{":
                raise _LiteralFault("expected '{'", cursor.peek() == "")
            arguments = cursor.object(scan.tools.properties(name), 0)
        except _LiteralFault as fault:
            return self._broken(scan, start, name, inside, fault)
        after = scan.text.skip_blanks(cursor.place)
        complete = scan.text.at(self.closer, after)
        end = after + len(self.closer) if complete else cursor.place
        return Reading(end, [scan.call(name, arguments, (start, end), complete=complete)])

    def _broken(self, scan: Scan, start: int, name: str, inside: int, fault: _LiteralFault) -> Reading:
        end = self._region_end(scan, inside)
        cut = fault.cut and end == scan.end and not scan.text.raw.endswith(self.closer)
        error = f"The arguments of `{name}` are not written correctly: {fault}."
        if cut:
            error = f"The call `{name}` was cut off before it was complete."
        return Reading(end, [scan.call(name, {}, (start, end), complete=not cut, error=error)])

    def _region_end(self, scan: Scan, inside: int) -> int:
        place, marker = scan.first((self.closer, self.opener), inside)
        if place < 0:
            return scan.end
        return place + len(marker) if marker == self.closer else place


FORMATS = (
    Format(
        "gemma4",
        Literal(
            "<|tool_call>", "<tool_call|>", '<|"|>', bare_header=re.compile(r"(?m)^call:[A-Za-z_][\w.\-]{0,255}\{")
        ),
        aliases=("gemma_4", "gemma"),
        reasoning=Reasoning(
            ("<|channel><|channel>thought\n", "<|channel>thought\n", "<|channel>thought", "<|channel>"),
            ("<channel|>",),
            implicit_end=True,
        ),
        structure=("<channel|>", "<turn|>", "<|tool_response>"),
        trim="verbatim",
        models="Gemma 4",
    ),
    Format(
        "functiongemma",
        Literal("<start_function_call>", "<end_function_call>", "<escape>"),
        reasoning=None,
        structure=("<end_of_turn>", "<start_function_response>"),
        models="FunctionGemma",
    ),
)
