"""Reads calls written as tags with one tag per parameter (Qwen3-Coder, MiniMax, DSML, MiniCPM, Kimi K3 and others).

A parameter's closing tag counts only where structure follows (the next parameter, the end of the call, the end of
text); anywhere else it is part of the value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import unescape
from typing import Any, Literal

from tool_parsers.jsonread import Decoded, Fault, decode, loads
from tool_parsers.readers.json_calls import JsonCalls
from tool_parsers.schema import Tools, as_text, fitted, json_or_text, typed, types_of
from tool_parsers.spec import Reading, Scan, Segment


def without_template_newlines(value: str) -> str:
    """The value without the one newline a template writes on each side of it."""
    if value.startswith("\n"):
        value = value[1:]
    return value[:-1] if value.endswith("\n") else value


def typed_by_attribute(value: str, is_string: bool, schema: Any) -> Any:
    """A value whose tag says whether it is a string; a schema that says otherwise wins."""
    allowed = types_of(schema)
    if is_string:
        return typed(value, schema) if allowed and "string" not in allowed else value
    outcome = loads(value)
    if not isinstance(outcome, Decoded):
        return typed(value, schema)
    if allowed == {"string"}:
        return value if isinstance(outcome.value, str) else as_text(outcome.value)
    return fitted(outcome.value, schema)


def unwrapped(tools: Tools, name: str, arguments: dict[str, Any], wrappers: tuple[str, ...]) -> dict[str, Any]:
    """The arguments inside a single wrapping parameter, unless the tool declares a parameter of that name."""
    if len(arguments) != 1 or name not in tools.parameters:
        return arguments
    ((key, value),) = arguments.items()
    if key not in wrappers or key in tools.properties(name):
        return arguments
    outcome = loads(value) if isinstance(value, str) else None
    inner = outcome.value if isinstance(outcome, Decoded) else value
    fits = isinstance(inner, dict) and (not inner or not inner.keys().isdisjoint(tools.properties(name)))
    return inner if isinstance(inner, dict) and fits else arguments


Untyped = Literal["text", "json"]


@dataclass
class _Call:
    """One call as its parameters are collected."""

    name: str
    start: int
    arguments: dict[str, Any]
    closed: bool = False
    error: str | None = None
    repaired: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tagged:
    """`OPENER (FUNCTION (PARAMETER value CLOSER)* FUNCTION_END)* CLOSER`; the patterns name their parts.

    `function` has the group `name` (and `empty` for a self-closing tag); `parameter` has `key` and may have `type`.
    """

    function: re.Pattern[str]
    function_ends: tuple[str, ...]
    parameter: re.Pattern[str]
    parameter_end: str
    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    trim_newline: bool = False
    """Whether the template writes one newline on each side of a value."""
    untyped: Untyped = "text"
    """What to do with a value whose schema says nothing."""
    marker: str = ""
    """The literal that every function tag begins with."""
    json_body: bool = False
    """Whether a call's body may be one JSON object instead of parameters."""
    json_block: re.Pattern[str] | None = None
    """What opens a block with all arguments as one JSON object, closed by one of `json_block_ends`."""
    json_block_ends: tuple[str, ...] = ()
    json_calls: bool = False
    """Whether the opener may be followed by JSON call objects instead of tags."""
    unwrap: tuple[str, ...] = ()
    """Names of a single parameter that only wraps the real arguments, unless the schema declares it."""
    attribute_types: bool = False
    """Whether the parameter's own type attribute decides (`string="true"`, `type="number"`)."""
    decode_value: Callable[[str], str] | None = None
    unescape_attributes: bool = False
    duplicates_are_errors: bool = False
    own_markup: bool = False
    """Whether the tags are written nowhere else, so that a parameter tag inside a sentence is the next parameter."""
    prints_python: bool = False
    """Whether the template prints null as `None`."""
    repeated_name: bool = False
    """Whether `tool.tool` means `tool` (a namespace with one function)."""

    def find(self, scan: Scan, start: int) -> int:
        """The next opener or function tag."""
        place, _ = scan.first(self.openers, start)
        match = scan.text.search(self.function, start)
        if match is not None and match.start() < scan.end and (place < 0 or match.start() < place):
            return match.start()
        return place

    def read(self, scan: Scan, start: int) -> Reading | None:
        """Read every function tag of this opener."""
        text = scan.text
        opener = next((o for o in self.openers if text.at(o, start)), "")
        place = text.skip_blanks(start + len(opener))
        if not self._function_at(scan, place):
            return self._without_function(scan, start, place, opener)
        reading = Reading(place)
        first = start
        while (function := self._function_at(scan, place)) is not None:
            call, place = self._call(scan, function)
            after = text.skip_blanks(place)
            closer = next((c for c in self.closers if text.at(c, after)), "")
            end = after + len(closer) if closer else place
            reading.calls.append(self._recorded(scan, call, (first, end), bool(closer) or call.closed))
            place = first = end
            if closer or not opener:
                break
            place = first = after if self._function_at(scan, after) else end
        reading.end = min(place, scan.end)
        return reading

    def read_parameters(self, scan: Scan, segment: Segment) -> Reading:
        """Read the parameters of a message whose header named the tool."""
        outer, scan.end = scan.end, segment.end
        call = _Call(segment.name, segment.opened, {}, closed=True)
        place = self._parameters(scan, call, self._json_arguments(scan, call, segment.start))
        if not call.arguments and call.error is None and not segment.closed:
            call.error = f"The call `{call.name}` was cut off before its arguments."
        if call.error is None and scan.text.raw[place : segment.end].strip():
            call.error = f"The call `{call.name}` has text where a parameter was expected."
        scan.end = outer
        return Reading(segment.end, [self._recorded(scan, call, (segment.opened, segment.end), segment.closed)])

    def _function_at(self, scan: Scan, place: int) -> re.Match[str] | None:
        return self.function.match(scan.text.raw, place, scan.end)

    def _without_function(self, scan: Scan, start: int, place: int, opener: str) -> Reading | None:
        """An opener without a function tag: JSON where the format allows it, else a malformed call."""
        if not opener:
            return None
        if self.json_calls and scan.text.raw[place : place + 1] in ("{", "["):
            return JsonCalls((opener,), self.closers).read_body(scan, start, place)
        closer, marker = scan.first(self.closers, place)
        following = self.find(scan, start + len(opener))
        if closer >= 0 and (following < 0 or closer < following):
            end = closer + len(marker)
        else:
            end = following if following >= 0 else scan.end
        message = "A call began but names no function."
        return Reading(end, errors=[scan.malformed(message, (start, end))])

    # -- one call

    def _call(self, scan: Scan, function: re.Match[str]) -> tuple[_Call, int]:
        name = self._attribute(function.group("name"))
        half = len(name) // 2
        if self.repeated_name and name[:half] == name[half + 1 :] and name[half : half + 1] == ".":
            name = name[:half]
        call = _Call(name, function.start(), {})
        place = function.end()
        if function.groupdict().get("empty"):
            call.closed = True
            return call, place
        place = self._parameters(scan, call, self._json_arguments(scan, call, place))
        return call, self._function_end(scan, call, place)

    def _parameters(self, scan: Scan, call: _Call, place: int) -> int:
        properties = scan.tools.properties(call.name)
        while True:
            at = scan.text.skip_blanks(place)
            simple = self.simple_parameter.match(scan.text.raw, at, scan.end)
            if simple is not None:
                self._store(call, simple, simple.group("simple_value"), properties)
                place = simple.end()
                continue
            parameter = self.parameter.match(scan.text.raw, at, scan.end)
            if parameter is None:
                return place
            place = self._parameter(scan, call, parameter, properties)

    @cached_property
    def simple_parameter(self) -> re.Pattern[str]:
        """A parameter without any tag in its value, taken in one step; the long way gives the same outcome."""
        ends = "|".join(re.escape(end) for end in self.function_ends)
        structure = f"(?={self.parameter.pattern}|{ends})".replace("?P<", "?P<n_")
        first = re.escape(self.parameter_end[0])
        return re.compile(
            rf"{self.parameter.pattern}(?P<simple_value>[^{first}<]*+){re.escape(self.parameter_end)}\s*+{structure}"
        )

    def _json_arguments(self, scan: Scan, call: _Call, place: int) -> int:
        body = scan.text.skip_blanks(place)
        block = self.json_block.match(scan.text.raw, body, scan.end) if self.json_block else None
        if block is not None:
            body = scan.text.skip_blanks(block.end())
        if not (self.json_body or block) or scan.text.raw[body : body + 1] != "{":
            return place
        outcome = decode(scan.text, body, (*self.function_ends, *self.closers, *self.openers, self.marker), scan.end)
        if isinstance(outcome, Fault):
            call.error = f"The arguments of `{call.name}` are not valid JSON: {outcome.message}."
            return place
        call.arguments, call.repaired = outcome.value, outcome.repairs
        after = scan.text.skip_blanks(outcome.end)
        closer = next((end for end in self.json_block_ends if block and scan.text.at(end, after)), "")
        return after + len(closer) if closer else outcome.end

    def _parameter(self, scan: Scan, call: _Call, parameter: re.Match[str], properties: Mapping[str, Any]) -> int:
        key = self._attribute(parameter.group("key"))
        begin = parameter.end()
        end, place = self._value_end(scan, begin, properties)
        if end == place and "missing_closer" not in call.repaired:
            call.repaired = (*call.repaired, "missing_closer")
        if end == scan.end and place == end and call.error is None:
            call.error = f"The call `{call.name}` was cut off inside its parameter `{key}`."
        self._store(call, parameter, scan.text.raw[begin:end], properties)
        return place

    def _store(self, call: _Call, parameter: re.Match[str], value: str, properties: Mapping[str, Any]) -> None:
        key = self._attribute(parameter.group("key"))
        if key in call.arguments and self.duplicates_are_errors:
            call.error = f"The parameter `{key}` of `{call.name}` is given twice."
        if self.trim_newline:
            value = without_template_newlines(value)
        if self.decode_value is not None:
            value = self.decode_value(value)
        kind = parameter.groupdict().get("type")
        call.arguments[key] = self._value(value, kind, properties.get(key))

    def _value_end(self, scan: Scan, begin: int, properties: Mapping[str, Any]) -> tuple[int, int]:
        """Where the value ends and where reading goes on; both the region's end when it was cut off."""
        text = scan.text
        closer = self._balanced_closer(scan, begin)
        any_closer = scan.find(self.parameter_end, begin)
        candidates = self._next_parameter(scan, begin, any_closer, properties)
        for end in (*self.function_ends, *self.closers):
            place = text.find_structural(end, self.end_followers, begin)
            candidates += [place] if place >= 0 else []
        limit = min((place for place in candidates if place < scan.end), default=-1)
        if limit >= 0 and (any_closer < 0 or limit < any_closer):
            return limit, limit
        if 0 <= closer < scan.end and not self._call_between(scan, limit, closer):
            return closer, closer + len(self.parameter_end)
        if limit >= 0:
            return limit, limit
        return scan.end, scan.end

    def _balanced_closer(self, scan: Scan, begin: int) -> int:
        """The structural closer of a value; a value may quote whole calls, whose closers are its data."""
        text = scan.text
        first = closer = text.find_structural(self.parameter_end, self.followers, begin)
        while scan.lookaheads > 0 and 0 <= closer < scan.end:
            if text.count_matches(self.function, begin, closer) <= text.count(self.function_ends, begin, closer):
                return closer
            scan.lookaheads -= 1
            closer = text.find_structural(self.parameter_end, self.followers, closer + 1)
        return first

    def _call_between(self, scan: Scan, limit: int, closer: int) -> bool:
        """Whether the closer found belongs to a later call: this one ended at `limit` without its own."""
        if not 0 <= limit < closer:
            return False
        following = scan.text.search(self.function, limit)
        return following is not None and following.start() < closer

    def _next_parameter(self, scan: Scan, begin: int, before: int, properties: Mapping[str, Any]) -> list[int]:
        """Where the next parameter opens although this one was not closed; a tag the schema does not know is data."""
        before = before if before >= 0 else scan.end
        match = scan.text.search(self.line_parameter, begin)
        while match is not None and match.start() < before:
            known = self._attribute(match.group("key")) in properties
            if scan.text.count_matches(self.function, begin, match.start()):
                return []
            on_its_own_line = not self.trim_newline or scan.text.raw[match.start() - 1] == "\n"
            if known or (not properties and on_its_own_line):
                return [match.start()]
            match = scan.text.search(self.line_parameter, match.end())
        return []

    @cached_property
    def followers(self) -> re.Pattern[str]:
        """What makes a parameter's closing tag structure."""
        ends = "|".join(re.escape(end) for end in (*self.function_ends, *self.closers, *self.openers))
        return re.compile(f"(?:{self.parameter.pattern}|{self.function.pattern}|{ends})".replace("?P<", "?P<f_"))

    @cached_property
    def end_followers(self) -> re.Pattern[str]:
        """What makes the end tag of a function or a call structure."""
        ends = "|".join(re.escape(end) for end in (*self.function_ends, *self.closers, *self.openers))
        return re.compile(f"(?:{self.function.pattern}|{ends})")

    @cached_property
    def line_parameter(self) -> re.Pattern[str]:
        """A parameter tag that can be the next parameter: not one quoted in running text."""
        return self.parameter if self.own_markup else re.compile("(?<! )" + self.parameter.pattern)

    def _function_end(self, scan: Scan, call: _Call, place: int) -> int:
        after = scan.text.skip_blanks(place)
        closer = next((c for c in self.function_ends if scan.text.at(c, after)), "")
        if closer:
            call.closed = True
            return after + len(closer)
        if call.error is None and not call.closed:
            return self._lost(scan, call, after)
        return min(place, scan.end)

    def _lost(self, scan: Scan, call: _Call, place: int) -> int:
        """Neither parameter nor end follows: skip to the next structure; stray text inside is an error."""
        ends = (*self.function_ends, *self.closers)
        stop, marker = scan.first(ends, place)
        following = self.find(scan, place)
        if stop >= 0 and (following < 0 or stop < following):
            junk, end = scan.text.raw[place:stop], stop + len(marker) if marker in self.function_ends else stop
        else:
            end = following if following >= 0 else scan.end
            junk = scan.text.raw[place:end]
            if not following >= 0:
                end = place
        if junk.strip():
            call.error = f"The call `{call.name}` has text where a parameter was expected: {junk.strip()[:40]!r}."
        elif not call.arguments and (stop < 0 or 0 <= following < stop):
            call.error = f"The call `{call.name}` was cut off before it was complete."
        return end

    # -- values

    def _value(self, value: str, kind: str | None, schema: Any) -> Any:
        if self.prints_python and value == "None" and "null" in types_of(schema):
            return None
        if self.attribute_types and kind is not None:
            return typed_by_attribute(value, kind in ("true", "string"), schema)
        return typed(value, schema, json_or_text if self.untyped == "json" else None)

    def _attribute(self, value: str) -> str:
        return unescape(value) if self.unescape_attributes else value.strip()

    def _recorded(self, scan: Scan, call: _Call, span: tuple[int, int], complete: bool) -> Any:
        arguments = unwrapped(scan.tools, call.name, call.arguments, self.unwrap)
        return scan.call(call.name, arguments, span, complete=complete, repaired=call.repaired, error=call.error)
