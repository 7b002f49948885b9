"""A tokenizer's own `response_template` (transformers 5) as one more source of a format.

Only the description is taken: which markers open and close thinking, calls and content, and what the calls' body is.
The reading is done by the same engine as every other format, so a broken call does not lose the message. What the
engine's grammars cannot express is refused when the template is loaded, never guessed at when text arrives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tool_parsers.formats.literal import Literal
from tool_parsers.readers.headed import Arguments, read_json_arguments
from tool_parsers.readers.json_calls import DEFAULT_KEYS, JsonCalls, Keys
from tool_parsers.readers.tagged import Tagged
from tool_parsers.spec import Format, Reader, Reading, Reasoning, Scan


@dataclass(frozen=True)
class PatternCalls:
    """`OPEN(name) body CLOSE`, the body being one JSON object, or JSON call objects where no name is captured."""

    opener: re.Pattern[str]
    closers: tuple[str, ...]
    keys: Keys = DEFAULT_KEYS
    quote: str = ""
    """The string delimiter of a Gemma-like literal; '' for JSON."""

    def find(self, scan: Scan, start: int) -> int:
        match = scan.text.search(self.opener, start)
        return match.start() if match is not None and match.start() < scan.end else -1

    def read(self, scan: Scan, start: int) -> Reading | None:
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


_THINKING = ("thinking", "reasoning", "reasoning_content")
_BLANKS = r"\s*"
_PLACEHOLDER = re.compile(r"\{(\w+)(?:\.(\w+))?\}")
_SPECIAL = re.compile(r"(?<!\\)[.^$*+?{}\[\]|()]")


class UnsupportedTemplate(ValueError):
    """The response template says something this engine cannot express; the message names it."""


def format_from(template: Mapping[str, Any], name: str = "response_template") -> Format:
    """The format a response template describes."""
    fields = template.get("fields")
    if not isinstance(fields, Mapping) or not fields:
        raise UnsupportedTemplate("a response template needs `fields`")
    thinking = next((fields[key] for key in _THINKING if key in fields), None)
    calls, content = fields.get("tool_calls"), fields.get("content")
    structure = _markers(content, "close") if isinstance(content, Mapping) else ()
    opened = _markers(content, "open") if isinstance(content, Mapping) else ()
    return Format(
        name,
        _reader(calls) if isinstance(calls, Mapping) else None,
        reasoning=_reasoning(thinking) if isinstance(thinking, Mapping) else None,
        structure=(*opened, *structure),
        models="any checkpoint that has the template",
    )


def _reasoning(field: Mapping[str, Any]) -> Reasoning:
    openers, closers = _markers(field, "open"), _markers(field, "close")
    if not openers or not closers:
        raise UnsupportedTemplate("the thinking field needs markers to open and to close it")
    return Reasoning(openers, closers)


def _reader(field: Mapping[str, Any]) -> Reader:
    kind = field.get("content", "text")
    opener = _pattern(field, "open")
    if kind == "xml-inline":
        return _tagged(field, opener)
    if kind != "json":
        raise UnsupportedTemplate(f"calls with content {kind!r} cannot be read; json and xml-inline can")
    arguments = field.get("content_args") or {}
    delimiters = arguments.get("string_delims") or []
    keys = _keys(field)
    return PatternCalls(
        re.compile(opener), _markers(field, "close"), keys, quote=delimiters[0][0] if delimiters else ""
    )


def _tagged(field: Mapping[str, Any], opener: str) -> Tagged:
    pattern = (field.get("content_args") or {}).get("tag_pattern", "")
    before, value, after = pattern.partition("(?P<value>")
    if not value or "?P<key>" not in before or "?P<name>" not in opener:
        raise UnsupportedTemplate("xml-inline calls need a name in the opener and key and value in the tag pattern")
    end = after.split(")", 1)[1]
    ends = [_literal(part) for part in _pattern(field, "close").split(_BLANKS) if part]
    trims = before.endswith(_BLANKS)
    return Tagged(
        function=re.compile(opener),
        function_ends=(ends[0],) if ends else (),
        parameter=re.compile(before.removesuffix(_BLANKS)),
        parameter_end=_literal(end.removeprefix(_BLANKS)),
        closers=tuple(ends[1:]),
        trim_newline=trims,
    )


def _keys(field: Mapping[str, Any]) -> Keys:
    """Which keys of a call object hold name and arguments, from the transform."""
    function = field.get("transform")
    function = function.get("function") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping):
        return Keys()
    found = {part: _PLACEHOLDER.fullmatch(str(function.get(part, ""))) for part in ("name", "arguments")}
    name, arguments = (match.group(2) or match.group(1) if match else "" for match in found.values())
    return Keys((name, *Keys().name), tuple(key for key in (arguments, *Keys().arguments) if key != "content"))


def _pattern(field: Mapping[str, Any], side: str) -> str:
    """The side's pattern as regex text, without the blanks around it (they are skipped anyway, in linear time)."""
    if f"{side}_pattern" in field:
        pattern = str(field[f"{side}_pattern"])
        return pattern.removeprefix(_BLANKS).removesuffix(_BLANKS)
    literals = _markers(field, side)
    return "|".join(re.escape(literal) for literal in sorted(literals, key=len, reverse=True))


def _markers(field: Mapping[str, Any], side: str) -> tuple[str, ...]:
    """The side's markers as literals."""
    given = field.get(side)
    if isinstance(given, str):
        return (given,)
    if isinstance(given, list):
        return tuple(str(marker) for marker in given)
    pattern = field.get(f"{side}_pattern")
    if pattern is None:
        return ()
    bare = str(pattern).removeprefix(_BLANKS).removesuffix(_BLANKS)
    group = re.fullmatch(r"\(\?:(.*)\)", bare)
    # Escaped bars (`<\\|im_end\\|>`) are part of a marker; bare ones separate markers.
    parts = re.split(r"(?<!\\)\|", group.group(1)) if group else [bare]
    return tuple(_literal(part) for part in parts)


def _literal(pattern: str) -> str:
    """The text a pattern without operators stands for."""
    if _SPECIAL.search(pattern):
        raise UnsupportedTemplate(f"the pattern {pattern!r} is not a plain marker")
    return re.sub(r"\\(.)", lambda match: {"n": "\n", "t": "\t"}.get(match.group(1), match.group(1)), pattern)
