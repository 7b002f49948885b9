"""Reads calls whose name stands in a header before JSON arguments (DeepSeek, Kimi, Mistral, functionary, harmony)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tool_parsers.jsonread import Fault, decode
from tool_parsers.readers.json_calls import JsonCalls
from tool_parsers.schema import properties_of
from tool_parsers.spec import MAX_NAME, Reading, Scan, Segment

_FENCE = re.compile(r"```[a-zA-Z]{0,16}+[ \t]*+\n?")
_STRAY = re.compile(r"[\s}]*+")
_NAME_LINE = re.compile(r"[^\n`{<]{0,256}+")


@dataclass(frozen=True)
class Arguments:
    """JSON arguments as read: the object or an error, where they end, and whether they were all there."""

    value: Any
    end: int
    repaired: tuple[str, ...] = ()
    error: str | None = None
    complete: bool = True


@dataclass(frozen=True)
class Headed:
    """`OPENER header SEPARATOR {json} CLOSER`."""

    openers: tuple[str, ...]
    separators: tuple[str, ...]
    closers: tuple[str, ...] = ()
    name: Callable[[str], str] = str.strip
    """From the header to the name; '' when the header names nothing."""
    kind_words: tuple[str, ...] = ()
    """Headers that only say what kind of call follows; the name is then on the line after the separator."""
    arrays: JsonCalls | None = None
    """Read with this where JSON follows the opener at once."""
    brace_ends_header: bool = False
    orphan_header: re.Pattern[str] | None = None
    """A header (its first group) with its separator, for models that drop the opener."""
    infer_from_keys: bool = False
    """Whether a bare counter as header means: the tool that has these arguments."""
    fence: bool = False
    stop_at: tuple[str, ...] = ()
    """Further markers no call reaches across (the section's end)."""

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Markers malformed arguments can not reach across."""
        return self.closers + self.openers + self.stop_at

    def find(self, scan: Scan, start: int) -> int:
        """The next opener, or the next header that lost its opener."""
        place, _ = scan.first(self.openers, start)
        orphan = self._orphan(scan, start)
        return orphan.start() if orphan is not None and (place < 0 or orphan.start() < place) else place

    def _orphan(self, scan: Scan, start: int) -> re.Match[str] | None:
        """A header without opener that names a declared tool (any tool, when none are declared)."""
        match = scan.text.search(self.orphan_header, start) if self.orphan_header is not None else None
        if match is None or match.start() >= scan.end:
            return None
        return match if scan.tools.declared(self.name(match.group(1))) is not False else None

    def read(self, scan: Scan, start: int) -> Reading | None:
        opener = next((opener for opener in self.openers if scan.text.at(opener, start)), "")
        inside = start + len(opener)
        first = scan.text.skip_blanks(inside)
        if self.arrays is not None and self._array_follows(scan, first):
            return self.arrays.read_body(scan, start, inside)
        header, place = self._header(scan, inside)
        if place < 0:
            return self._headless(scan, start, inside)
        name = self.name(header)
        if header.strip() in self.kind_words:
            line = _NAME_LINE.match(scan.text.raw, place, scan.end)
            name, place = (line.group().strip(), line.end()) if line else ("", place)
        arguments = read_json_arguments(scan, place, name, self.stops, self.closers, self.fence)
        if self.infer_from_keys and header.strip().isdigit():
            name = self._inferred(scan, arguments.value) or name
        return self._reading(scan, start, name, header, arguments)

    def _array_follows(self, scan: Scan, first: int) -> bool:
        """Whether JSON stands there; the `[` of a marker is no array."""
        json = first < scan.end and scan.text.raw[first] in "[{"
        return json and not any(scan.text.at(marker, first) for marker in (*self.separators, *self.openers))

    def _header(self, scan: Scan, inside: int) -> tuple[str, int]:
        """The header and where the arguments begin, or ('', -1)."""
        place, separator = scan.first(self.separators, inside)
        brace = scan.find("{", inside) if self.brace_ends_header else -1
        if brace >= 0 and (place < 0 or brace < place):
            place, separator = brace, ""
        stop, _ = scan.first(self.stops, inside)
        if place < 0 or place - inside > MAX_NAME + 64 or (0 <= stop < place):
            return "", -1
        return scan.text.raw[inside:place], place + len(separator)

    def _headless(self, scan: Scan, start: int, inside: int) -> Reading:
        stop, marker = scan.first(self.stops, inside)
        end = scan.end if stop < 0 else stop + len(marker) if marker in self.closers else stop
        message = "A call began but has no name followed by arguments."
        return Reading(end, errors=[scan.malformed(message, (start, end))])

    def _reading(self, scan: Scan, start: int, name: str, header: str, arguments: Arguments) -> Reading:
        span = (start, arguments.end)
        if not name:
            message = f"The header of the call names no tool: {header.strip()[:80]!r}."
            return Reading(arguments.end, errors=[scan.malformed(message, span)])
        call = scan.call(
            name,
            arguments.value,
            span,
            complete=arguments.complete,
            repaired=arguments.repaired,
            error=arguments.error,
        )
        return Reading(arguments.end, [call])

    @staticmethod
    def _inferred(scan: Scan, arguments: Any) -> str:
        if not isinstance(arguments, Mapping) or not arguments:
            return ""
        fitting = [
            name for name, schema in scan.tools.parameters.items() if set(arguments) <= set(properties_of(schema))
        ]
        return fitting[0] if len(fitting) == 1 else ""


def read_json_arguments(
    scan: Scan, place: int, name: str, stops: tuple[str, ...], closers: tuple[str, ...], fence_expected: bool = False
) -> Arguments:
    """Read the JSON object of a call whose name is known, up to and with its closer."""
    text = scan.text
    place = text.skip_blanks(place)
    fence = _FENCE.match(text.raw, place, scan.end)
    repaired = ["fence"] if fence and not fence_expected else []
    place = text.skip_blanks(fence.end()) if fence else place
    if text.raw[place : place + 1] != "{" or place >= scan.end:
        return _not_an_object(scan, place, name, stops, closers)
    outcome = decode(text, place, stops, scan.end)
    if isinstance(outcome, Fault):
        return _broken(scan, place, name, outcome, stops, closers)
    stray = _STRAY.match(text.raw, outcome.end, scan.end)
    end = outcome.end
    if stray is not None and "}" in stray.group():
        repaired.append("extra_bracket")
        end += stray.group().rindex("}") + 1
    after = text.skip_blanks(end)
    if text.at("```", after):
        end = after + 3
        after = text.skip_blanks(end)
    closer = next((c for c in closers if text.at(c, after)), "")
    complete = bool(closer) or not closers
    end = after + len(closer) if closer else end
    return Arguments(outcome.value, min(end, scan.end), (*outcome.repairs, *repaired), complete=complete)


def _region_end(scan: Scan, place: int, stops: tuple[str, ...], closers: tuple[str, ...]) -> tuple[int, int, bool]:
    """Where a malformed body ends, where reading goes on, and whether a closer was there."""
    stop, marker = scan.first(stops, place)
    if stop < 0:
        return scan.end, scan.end, not closers
    closed = marker in closers
    return stop, stop + len(marker) if closed else stop, closed


def _not_an_object(scan: Scan, place: int, name: str, stops: tuple[str, ...], closers: tuple[str, ...]) -> Arguments:
    stop, end, closed = _region_end(scan, place, stops, closers)
    body = scan.text.raw[place:stop].strip(" \n`")
    if not body and closed and stop < scan.end:
        return Arguments({}, end)
    if not body:
        return Arguments({}, end, error=f"The call `{name}` was cut off before its arguments.", complete=False)
    if body == "null":
        return Arguments({}, end, complete=closed)
    return Arguments({}, end, error=f"The arguments of `{name}` must be one JSON object.", complete=closed)


def _broken(
    scan: Scan, place: int, name: str, fault: Fault, stops: tuple[str, ...], closers: tuple[str, ...]
) -> Arguments:
    _, end, closed = _region_end(scan, place + 1, stops, closers)
    if fault.cut and not closed:
        return Arguments({}, end, error=f"The call `{name}` was cut off before it was complete.", complete=False)
    return Arguments({}, end, error=f"The arguments of `{name}` are not valid JSON: {fault.message}.", complete=closed)


def read_arguments(scan: Scan, segment: Segment) -> Reading:
    """Read the JSON arguments of a message whose header named the tool."""
    outer, scan.end = scan.end, segment.end
    arguments = read_json_arguments(scan, segment.start, segment.name, (), ())
    scan.end = outer
    if segment.closed and not scan.text.raw[segment.start : segment.end].strip():
        arguments = Arguments({}, segment.end)
    call = scan.call(
        segment.name,
        arguments.value,
        (segment.opened, segment.end),
        complete=arguments.complete,
        repaired=arguments.repaired,
        error=arguments.error,
    )
    return Reading(segment.end, [call])
