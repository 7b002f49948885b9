"""Reads calls opened by a pattern that may name the tool, with a JSON or Gemma-literal body (response templates)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from tool_parsers.readers.headed import Arguments, read_json_arguments
from tool_parsers.readers.json_calls import JsonCalls
from tool_parsers.readers.literal_calls import Literal
from tool_parsers.shapes import DEFAULT_KEYS, Keys
from tool_parsers.spec import Reading, Scan


@dataclass(frozen=True)
class PatternCalls:
    """`OPEN(name) body CLOSE`, the body being one JSON object, or JSON call objects where no name is captured."""

    opener: re.Pattern[str]
    closers: tuple[str, ...]
    keys: Keys = DEFAULT_KEYS
    quote: str = ""
    """The string delimiter of a Gemma-like literal; '' for JSON."""

    def find(self, scan: Scan, start: int) -> int:
        """The next opener."""
        match = scan.text.search(self.opener, start)
        return match.start() if match is not None and match.start() < scan.end else -1

    def read(self, scan: Scan, start: int) -> Reading | None:
        """Read the call or calls of this opener."""
        match = self.opener.match(scan.text.raw, start, scan.end)
        if match is None:
            return None
        name = match.groupdict().get("name")
        if name is None:
            return self._objects(scan, start, match)
        if self.quote:
            literal = Literal(match.group(), self.closers[0], self.quote)
            return literal.read_named(scan, start, name, match.end())
        stop = scan.text.search(self.opener, match.end())
        outer, scan.end = scan.end, min(scan.end, stop.start()) if stop is not None else scan.end
        arguments = read_json_arguments(scan, match.end(), name, self.closers, self.closers)
        scan.end = outer
        return Reading(arguments.end, [self._call(scan, start, name, arguments)])

    def _objects(self, scan: Scan, start: int, match: re.Match[str]) -> Reading | None:
        reader = JsonCalls((match.group(),), self.closers, self.keys)
        return reader.read(scan, start)

    @staticmethod
    def _call(scan: Scan, start: int, name: str, found: Arguments) -> Any:
        return scan.call(
            name,
            found.value,
            (start, found.end),
            complete=found.complete,
            repaired=found.repaired,
            error=found.error,
        )
