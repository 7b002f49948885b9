"""Reads calls written as JSON objects: one in a tag, several in a tag, an array, or bare in the text.

Every object is read on its own, so a broken one never costs its neighbours, whether they stand in an array, one per
line, or separated by `;`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tool_parsers.jsonread import Decoded, Fault, decode, decode_strictly, loads
from tool_parsers.spec import Reading, Scan

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
            if arguments.lstrip()[0] not in "{[":
                return Shape(name, arguments, repairs)
            error = f"The arguments of `{name}` are a string that is not JSON ({outcome.message}): write an object."
            return Shape(name, None, repairs, error)
        arguments, repairs = outcome.value, (*repairs, "string_arguments", *outcome.repairs)
    return Shape(name, {} if arguments is None else arguments, repairs)


def name_in(raw: str) -> str:
    """The name in the text of a broken call object, or ''."""
    match = _NAME_IN_TEXT.search(raw[:4096])
    return match.group(1) if match else ""


_FENCE = re.compile(r"```[a-zA-Z_]{0,16}+[ \t]*+")
_BETWEEN = re.compile(r"[\s,;\[\]]*+")
_STRAY_BRACES = re.compile(r"[\s}\]]*+")
_OBJECT_WITH_NAME = re.compile(r"""\{\s*+["'](?:name|tool_name|function|type)["']""")


@dataclass
class _Body:
    """The objects between an opener and its closer, as they are being read."""

    reading: Reading = field(default_factory=lambda: Reading(0))
    arrays: int = 0
    """Array brackets open minus closed."""
    fenced: bool = False
    last: int = 0
    """End of the last object, bracket or fence."""


@dataclass(frozen=True)
class JsonCalls:
    """JSON call objects after an opener, up to a closer if the format has one."""

    openers: tuple[str, ...]
    closers: tuple[str, ...] = ()
    keys: Keys = DEFAULT_KEYS
    needs: str = "{["
    """What must follow the opener for it to be an opener at all; '' when the opener alone is proof."""
    prefix: re.Pattern[str] | None = None
    """Text before the opener that belongs to the call (a message header, for instance)."""
    fence: bool = False
    """Whether a code fence around the objects is part of the format."""

    @cached_property
    def stops(self) -> tuple[str, ...]:
        """Markers a malformed object can not reach across."""
        return self.closers + self.openers

    def find(self, scan: Scan, start: int) -> int:
        if self.prefix is not None:
            match = scan.text.search(self.prefix, start)
            if match is not None:
                return match.start()
        return scan.first(self.openers, start)[0]

    def read(self, scan: Scan, start: int) -> Reading | None:
        """Read every object that belongs to this opener."""
        inside = self._inside(scan, start)
        if self.needs and not self._looks_like_a_call(scan, inside):
            return self._not_json(scan, start, inside)
        return self.read_body(scan, start, inside)

    def read_body(self, scan: Scan, start: int, inside: int) -> Reading:
        """Read the objects from `inside` on; the calls' region begins at `start`."""
        text, raw = scan.text, scan.text.raw
        body = _Body(reading=Reading(inside), last=inside)
        place = inside
        while True:
            place = self._skip_between(scan, place, body)
            if place < scan.end and raw[place] == "{" and not scan.exhausted:
                place = self._object(scan, place, body)
                continue
            closer = next((c for c in self.closers if text.at(c, place)), "")
            return self._finish(scan, start, place, closer, body)

    def _inside(self, scan: Scan, start: int) -> int:
        if self.prefix is not None:
            match = self.prefix.match(scan.text.raw, start)
            if match is not None:
                return match.end()
        _, opener = scan.first(self.openers, start)
        return start + len(opener)

    def _looks_like_a_call(self, scan: Scan, inside: int) -> bool:
        place = scan.text.skip_blanks(inside)
        if scan.text.at("```", place):
            return True
        return (
            place >= scan.end or scan.text.raw[place] in self.needs or any(scan.text.at(c, place) for c in self.closers)
        )

    def _not_json(self, scan: Scan, start: int, inside: int) -> Reading | None:
        """Closed by its tag it is a call with text before its JSON, or malformed; an opener alone is only text."""
        end, closed = self._look_for_closer(scan, inside)
        if not closed:
            return None
        found = scan.text.search(_OBJECT_WITH_NAME, inside)
        if found is not None and found.start() < end:
            reading = self.read_body(scan, start, found.start())
            noted = [scan.noted(call, "text_before_json") for call in reading.calls]
            return Reading(reading.end, noted, reading.errors)
        if scan.text.at('"', scan.text.skip_blanks(inside)):
            return self._quoted(scan, start, scan.text.skip_blanks(inside), end)
        message = "There is text in the call where JSON was expected."
        return Reading(end, errors=[scan.malformed(message, (start, end))])

    def _quoted(self, scan: Scan, start: int, place: int, end: int) -> Reading:
        """The whole call written as a JSON string."""
        outcome = decode_strictly(scan.text, place)
        inner = loads(outcome.value) if isinstance(outcome, Decoded) and isinstance(outcome.value, str) else None
        if not isinstance(inner, Decoded):
            message = "The call is a string that is not JSON."
            return Reading(end, errors=[scan.malformed(message, (start, end))])
        shape = shape_of(inner.value, self.keys)
        repaired = ("escaped_json", *inner.repairs, *shape.repairs)
        return Reading(
            end, [scan.call(shape.name, shape.arguments, (start, end), repaired=repaired, error=shape.error)]
        )

    def _skip_between(self, scan: Scan, place: int, body: _Body) -> int:
        """Over blanks, separators, array brackets and fences."""
        raw = scan.text.raw
        opener, _ = scan.first(self.openers, place)
        end = opener if opener >= 0 else scan.end
        while True:
            match = _BETWEEN.match(raw, place, end)
            skipped = match.group() if match else ""
            if not self.closers and body.arrays + skipped.count("[") <= skipped.count("]") and "]" in skipped:
                # Without a closing tag the array's own end is the end: what follows is text.
                body.arrays = 0
                body.last = place + skipped.rindex("]") + 1
                return body.last
            body.arrays += skipped.count("[") - skipped.count("]")
            if "]" in skipped or "[" in skipped:
                body.last = place + max(skipped.rfind("]"), skipped.rfind("[")) + 1
            place += len(skipped)
            fence = _FENCE.match(raw, place, scan.end)
            if fence is None or (not body.fenced and body.reading.calls):
                return place
            body.fenced = True
            place = body.last = fence.end()

    def _object(self, scan: Scan, place: int, body: _Body) -> int:
        """Read one call object; returns where the next may begin."""
        outcome = decode(scan.text, place, self.stops, scan.end)
        if isinstance(outcome, Fault):
            return self._broken(scan, place, outcome, body)
        end = outcome.end
        shape = shape_of(outcome.value, self.keys)
        repaired = [*outcome.repairs, *shape.repairs]
        if body.fenced and not self.fence:
            repaired.append("fence")
        stray = _STRAY_BRACES.match(scan.text.raw, end, scan.end)
        if stray is not None and stray.group().count("}"):
            repaired.append("extra_bracket")
            end += stray.group().rindex("}") + 1
        if shape.name or "name" in (outcome.value if isinstance(outcome.value, dict) else {}):
            call = scan.call(shape.name, shape.arguments, (place, end), repaired=repaired, error=shape.error)
            body.reading.calls.append(call)
        else:
            body.reading.errors.append(scan.malformed(shape.error or "", (place, end)))
        body.last = end
        return end

    def _broken(self, scan: Scan, place: int, fault: Fault, body: _Body) -> int:
        """Record an object that could not be read, and find where its neighbour begins."""
        stop, _ = scan.first(self.stops, place + 1)
        stop = stop if stop >= 0 else scan.end
        neighbour = scan.text.search(_OBJECT_WITH_NAME, max(place + 1, min(fault.at, stop)))
        end = stop
        if neighbour is not None and neighbour.start() < stop and not fault.cut:
            end = neighbour.start()
        name = name_in(scan.text.raw[place:end])
        message = f"The call{f' `{name}`' if name else ''} is not valid JSON: {fault.message}."
        if fault.cut and end == scan.end:
            message = f"The call{f' `{name}`' if name else ''} was cut off before it was complete."
        if name:
            call = scan.call(name, {}, (place, end), complete=not fault.cut, error=message)
            body.reading.calls.append(call)
        else:
            body.reading.errors.append(scan.malformed(message, (place, end)))
        body.last = end
        return end

    def _finish(self, scan: Scan, start: int, place: int, closer: str, body: _Body) -> Reading:
        """Close the region: find the closer, widen the spans to the markers, note what was missing."""
        reading = body.reading
        complete = bool(closer) or not self.closers
        end = place + len(closer) if closer else body.last
        after = scan.text.skip_blanks(end)
        if body.fenced and not closer and scan.text.at("```", after):
            end = after + 3
        if not closer and self.closers:
            end, complete = self._look_for_closer(scan, place)
            if end > place and scan.text.raw[place : end - 1].strip() and not reading.calls:
                reading.errors.append(
                    scan.malformed("There is text in the call where JSON was expected.", (start, end))
                )
        if not reading.calls and not reading.errors:
            reading.errors.append(scan.malformed("The call is empty: no JSON object was found in it.", (start, end)))
        reading.end = min(end, scan.end)
        self._settle(scan, start, reading, complete, body.arrays > 0)
        return reading

    def _look_for_closer(self, scan: Scan, place: int) -> tuple[int, bool]:
        closer, marker = scan.first(self.closers, place)
        opener, _ = scan.first(self.openers, place)
        if closer >= 0 and (opener < 0 or closer < opener):
            return closer + len(marker), True
        return place, False

    def _settle(self, scan: Scan, start: int, reading: Reading, complete: bool, array_open: bool) -> None:
        calls = reading.calls
        if not calls:
            return
        single = len(calls) == 1 and not reading.errors
        last = calls[-1]
        repaired = [*last.repaired, "missing_bracket"] if array_open and last.ok else list(last.repaired)
        span = (start, reading.end) if single else last.span
        calls[-1] = scan.call(
            last.name,
            last.arguments,
            span,
            complete=complete and last.complete,
            repaired=repaired,
            error=last.error,
        )
