"""Reads calls whose arguments are nested elements, every tag marked by a prefix (MiniMax M3)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tool_parsers.schema import items_of, json_or_text, properties_of, typed, types_of
from tool_parsers.spec import Reading, Scan

_MAX_DEPTH = 60


class _ElementFault(ValueError):
    """The elements do not nest; `cut` tells whether the text simply ended."""

    def __init__(self, message: str, cut: bool) -> None:
        super().__init__(message)
        self.cut = cut


@dataclass(frozen=True)
class Elements:
    """`P<tool_call> (P<invoke name="N"> (P<key>value P</key>)* P</invoke>)* P</tool_call>` with a prefix P."""

    prefix: str
    item: str = "item"

    @cached_property
    def opener(self) -> str:
        """Opens a group of calls."""
        return self.prefix + "<tool_call>"

    @cached_property
    def closer(self) -> str:
        """Closes a group of calls."""
        return self.prefix + "</tool_call>"

    @cached_property
    def invoke(self) -> re.Pattern[str]:
        """Opens one call."""
        return re.compile(re.escape(self.prefix) + r"""<invoke name=["']?([^"'>\n]{1,256})["']?>""")

    @cached_property
    def tag(self) -> re.Pattern[str]:
        """Opens one element."""
        return re.compile(re.escape(self.prefix) + r"<(?!invoke |tool_call>)([^<>/\n][^<>\n]{0,255})>")

    def find(self, scan: Scan, start: int) -> int:
        """The next group, or a call outside any group."""
        place = scan.find(self.opener, start)
        match = scan.text.search(self.invoke, start)
        if match is not None and match.start() < scan.end and (place < 0 or match.start() < place):
            return match.start()
        return place

    def read(self, scan: Scan, start: int) -> Reading | None:
        """Read every call of a group."""
        text = scan.text
        place = text.skip_blanks(start + len(self.opener)) if text.at(self.opener, start) else start
        reading = Reading(place)
        first = start
        while not scan.exhausted and (match := self.invoke.match(text.raw, place, scan.end)) is not None:
            place = self._call(scan, first, match, reading)
            place = first = text.skip_blanks(place)
        if text.at(self.closer, place):
            place += len(self.closer)
        elif reading.calls:
            place = reading.calls[-1].span[1]
        if not reading.calls:
            end = self._after_closer(scan, place)
            return Reading(end, errors=[scan.malformed("A call began but names no function.", (start, end))])
        reading.end = min(place, scan.end)
        return reading

    def _call(self, scan: Scan, start: int, match: re.Match[str], reading: Reading) -> int:
        name = match.group(1).strip()
        try:
            arguments, end = self._children(scan, match.end(), "invoke", scan.tools.parameters.get(name), 0)
        except _ElementFault as fault:
            end = self._next_invoke(scan, match.end())
            cut = fault.cut and end >= scan.end
            error = f"The call `{name}` was cut off before it was complete." if cut else f"The call `{name}`: {fault}."
            reading.calls.append(scan.call(name, {}, (start, end), complete=not cut, error=error))
            return end
        reading.calls.append(scan.call(name, arguments, (start, end)))
        return end

    def _next_invoke(self, scan: Scan, place: int) -> int:
        following = scan.text.search(self.invoke, place)
        closer = scan.find(self.closer, place)
        ends = [match_start for match_start in (following.start() if following else -1, closer) if match_start >= 0]
        return min([*ends, scan.end])

    def _after_closer(self, scan: Scan, place: int) -> int:
        closer = scan.find(self.closer, place)
        opener = scan.find(self.opener, place)
        if closer >= 0 and (opener < 0 or closer < opener):
            return closer + len(self.closer)
        return opener if opener >= 0 else scan.end

    def _children(self, scan: Scan, place: int, parent: str, schema: Any, depth: int) -> tuple[Any, int]:
        """Read elements up to the parent's end tag; returns the value and where reading goes on."""
        if depth > _MAX_DEPTH:
            raise _ElementFault("its arguments are nested too deeply", False)
        end_tag = f"{self.prefix}</{parent}>"
        found: list[tuple[str, Any]] = []
        properties = properties_of(schema)
        while True:
            at = scan.text.skip_blanks(place)
            if scan.text.at(end_tag, at):
                return self._collected(found, schema, depth), at + len(end_tag)
            match = self.tag.match(scan.text.raw, at, scan.end)
            if match is None:
                raise _ElementFault(f"expected an element or the end of <{parent}>", at >= scan.end)
            key = match.group(1)
            child = items_of(schema) if key == self.item and key not in properties else properties.get(key)
            value, place = self._value(scan, match.end(), key, child, depth)
            found.append((key, value))

    def _value(self, scan: Scan, begin: int, key: str, schema: Any, depth: int) -> tuple[Any, int]:
        end_tag = f"{self.prefix}</{key}>"
        text_only = types_of(schema) == {"string"}
        if not text_only and self.tag.match(scan.text.raw, scan.text.skip_blanks(begin), scan.end):
            return self._children(scan, begin, key, schema, depth + 1)
        end = self._text_end(scan, begin, end_tag, text_only)
        if end < 0:
            raise _ElementFault(f"the element <{key}> is not closed", scan.find(self.prefix, begin) < 0)
        value = scan.text.raw[begin:end]
        if not value and types_of(schema) in ({"array"}, {"object"}):
            # The template writes an empty container as an empty element.
            return ([] if types_of(schema) == {"array"} else {}), end + len(end_tag)
        return typed(value, schema, json_or_text), end + len(end_tag)

    def _text_end(self, scan: Scan, begin: int, end_tag: str, text_only: bool) -> int:
        """Where a text value ends: at the next marked tag, or, in a string, at its own end tag within the call."""
        place = scan.find(self.prefix, begin)
        while place >= 0 and not scan.text.at(end_tag, place):
            size = len(self.prefix)
            if not text_only or scan.text.raw.startswith(("</invoke>", "<invoke ", "</tool_call>"), place + size):
                return -1
            place = scan.find(self.prefix, place + size)
        return place

    def _collected(self, found: list[tuple[str, Any]], schema: Any, depth: int) -> Any:
        """Elements named `item` are a list, everything else an object; a repeated key gathers its values."""
        allowed = types_of(schema)
        only_items = bool(found) and all(key == self.item for key, _ in found)
        if depth and (allowed == {"array"} or (only_items and self.item not in properties_of(schema))):
            return [value for _, value in found]
        collected: dict[str, Any] = {}
        repeated: set[str] = set()
        for key, value in found:
            if key in repeated:
                collected[key].append(value)
            elif key in collected:
                repeated.add(key)
                collected[key] = [collected[key], value]
            else:
                collected[key] = value
        return collected
