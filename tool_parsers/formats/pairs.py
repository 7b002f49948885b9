"""Grammar F: a name followed by key and value tags (GLM, Ling, Hunyuan, K2-Horizon and similar models)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from tool_parsers.readers.json_calls import JsonCalls
from tool_parsers.schema import typed
from tool_parsers.spec import MAX_NAME, THINK_IMPLICIT, Format, Reading, Reasoning, Scan
from tool_parsers.text import Text

_LITERAL_NEWLINES = re.compile(r"(?:\s|\\n)*+")
_NAME = re.compile(r"[^\s<>{}\[\]\"`]{1,256}")


@dataclass
class _Call:
    """One call as its pairs are collected."""

    name: str
    start: int
    arguments: dict[str, Any] = field(default_factory=dict)
    repaired: tuple[str, ...] = ()
    error: str | None = None


@dataclass(frozen=True)
class Pairs:
    """`OPENER name [SEPARATOR] (KEY key KEY_END VALUE value VALUE_END)* CLOSER`."""

    opener: str = "<tool_call>"
    closer: str = "</tool_call>"
    key: tuple[str, str] = ("<arg_key>", "</arg_key>")
    value: tuple[str, str] = ("<arg_value>", "</arg_value>")
    kind: tuple[str, str] = ("", "")
    """Optional tags between key and value that name the value's type."""
    separator: str = ""
    section_end: str = ""
    json_body: bool = False
    """Whether JSON call objects may stand between opener and closer."""

    @cached_property
    def followers(self) -> re.Pattern[str]:
        """What makes a value's closing tag structure."""
        return re.compile("|".join(map(re.escape, (self.key[0], self.closer, self.opener))) + r"|\\n")

    @cached_property
    def end_followers(self) -> re.Pattern[str]:
        """What makes a call's closing tag structure when its last value was never closed."""
        return re.compile("|".join(re.escape(marker) for marker in (self.opener, self.section_end) if marker))

    @cached_property
    def next_pair(self) -> re.Pattern[str]:
        """A key that can only be the next pair: one that has its value behind it."""
        key, key_end = map(re.escape, self.key)
        return re.compile(rf"{key}[^<>\n]{{1,256}}{key_end}(?:\s|\\n){{0,20}}(?:{re.escape(self.value[0])})")

    @cached_property
    def simple_pair(self) -> re.Pattern[str]:
        """A pair without any tag in its value, taken in one step; the long way gives the same outcome."""
        key, key_end = map(re.escape, self.key)
        value, value_end = map(re.escape, self.value)
        after = "|".join(map(re.escape, (self.key[0], self.closer)))
        return re.compile(rf"{key}([^<\n]{{1,256}}){key_end}\s*+{value}([^<]*+){value_end}\s*+(?={after})")

    def find(self, scan: Scan, start: int) -> int:
        return scan.find(self.opener, start)

    def read(self, scan: Scan, start: int) -> Reading | None:
        text = scan.text
        inside = text.skip_blanks(start + len(self.opener))
        if self.json_body and text.raw[inside : inside + 1] in ("{", "["):
            return JsonCalls((self.opener,), (self.closer,)).read_body(scan, start, inside)
        name, place = self._name(scan, inside)
        if not name:
            return self._nameless(scan, start, inside)
        call = _Call(name, start)
        return self._closed(scan, call, self._pairs(scan, call, place))

    def _name(self, scan: Scan, inside: int) -> tuple[str, int]:
        raw = scan.text.raw
        ends = [self.key[0], self.closer, self.opener, "\n", "\\n", *([self.separator] if self.separator else [])]
        place, marker = scan.first(ends, inside)
        place = place if place >= 0 else scan.end
        header = raw[inside : min(place, inside + MAX_NAME + 1)].strip()
        if place - inside > MAX_NAME or not _NAME.fullmatch(header):
            return "", inside
        if self.separator and marker == self.separator:
            place += len(marker)
        return header, place

    def _nameless(self, scan: Scan, start: int, inside: int) -> Reading:
        stop, marker = scan.first((self.closer, self.opener), inside)
        end = scan.end if stop < 0 else stop + len(marker) if marker == self.closer else stop
        return Reading(end, errors=[scan.malformed("A call began but has no name.", (start, end))])

    def _pairs(self, scan: Scan, call: _Call, place: int) -> int:
        """Collect the pairs; returns where they end."""
        properties = scan.tools.properties(call.name)
        while True:
            place = self._skip(scan, place)
            simple = self.simple_pair.match(scan.text.raw, place, scan.end)
            if simple is not None:
                key = simple.group(1).strip()
                call.arguments[key] = self._typed(simple.group(2), "", properties, key)
                place = simple.end()
            elif self.separator and scan.text.at(self.separator, place):
                place += len(self.separator)
            elif scan.text.at(self.key[0], place) and place < scan.end:
                place = self._pair(scan, call, place, properties)
            else:
                return place
            if call.error is not None:
                return place

    def _pair(self, scan: Scan, call: _Call, place: int, properties: Mapping[str, Any]) -> int:
        """Read one pair; a key without a value is left out."""
        key_end = scan.find(self.key[1], place)
        if key_end < 0 or key_end - place > MAX_NAME + len(self.key[0]):
            call.error = f"The call `{call.name}` has a key without its closing tag."
            return place + len(self.key[0])
        key = scan.text.raw[place + len(self.key[0]) : key_end].strip()
        kind, place = self._kind(scan, self._skip(scan, key_end + len(self.key[1])))
        if not scan.text.at(self.value[0], place):
            return place
        begin = place + len(self.value[0])
        end, place = self._value_end(scan, begin)
        if end < 0:
            call.error = f"The call `{call.name}` was cut off inside `{key}`."
            return scan.end
        if end == place:
            call.repaired = ("missing_closer",)
        call.arguments[key] = self._typed(scan.text.raw[begin:end], kind, properties, key)
        return place

    def _kind(self, scan: Scan, place: int) -> tuple[str, int]:
        opener, closer = self.kind
        if not opener or not scan.text.at(opener, place):
            return "", place
        end = scan.find(closer, place)
        if end < 0 or end - place > MAX_NAME:
            return "", place
        kind = scan.text.raw[place + len(opener) : end].strip()
        return kind, self._skip(scan, end + len(closer))

    def _value_end(self, scan: Scan, begin: int) -> tuple[int, int]:
        """Where the value ends and reading goes on; (-1, -1) when it was cut off."""
        text = scan.text
        closer = self._balanced_closer(scan, begin)
        any_closer = scan.find(self.value[1], begin)
        pair = text.search(self.next_pair, begin)
        key = pair.start() if pair is not None else -1
        end = text.find_structural(self.closer, self.end_followers, begin)
        limit = min((p for p in (key, end) if 0 <= p < scan.end), default=-1)
        quotes_call = text.count((self.opener,), begin, limit) > 0
        if limit >= 0 and not quotes_call and (any_closer < 0 or limit < any_closer):
            return limit, limit
        another = scan.find(self.opener, limit) if 0 <= limit < closer else -1
        if 0 <= closer < scan.end and not 0 <= another < closer:
            return closer, closer + len(self.value[1])
        return (limit, limit) if limit >= 0 else (-1, -1)

    def _balanced_closer(self, scan: Scan, begin: int) -> int:
        """The structural closer of a value; a value may quote whole calls, whose closers are its data."""
        text = scan.text
        first = closer = text.find_structural(self.value[1], self.followers, begin)
        while scan.lookaheads > 0 and 0 <= closer < scan.end:
            if text.count((self.opener,), begin, closer) <= text.count((self.closer,), begin, closer):
                return closer
            scan.lookaheads -= 1
            closer = text.find_structural(self.value[1], self.followers, closer + 1)
        return first

    def _typed(self, value: str, kind: str, properties: Mapping[str, Any], key: str) -> Any:
        schema = properties.get(key)
        if schema is None and kind:
            schema = {"type": kind}
        return typed(value, schema)

    def _closed(self, scan: Scan, call: _Call, place: int) -> Reading:
        """Find the call's end and record it."""
        complete = scan.text.at(self.closer, place)
        end = place + len(self.closer) if complete else place
        if not complete and place < scan.end:
            stop, marker = scan.first((self.closer, self.opener), place)
            if marker == self.closer:
                junk = scan.text.raw[place:stop].strip()
                call.error = call.error or f"The call `{call.name}` has text where a key was expected: {junk[:40]!r}."
                complete, end = True, stop + len(marker)
            elif stop >= 0:
                end = stop
        if call.error is None and not complete and not call.arguments:
            call.error = f"The call `{call.name}` was cut off before it was complete."
        span = (call.start, min(end, scan.end))
        recorded = scan.call(
            call.name, call.arguments, span, complete=complete, repaired=call.repaired, error=call.error
        )
        return Reading(min(max(end, call.start + 1), scan.end), [recorded])

    @staticmethod
    def _skip(scan: Scan, place: int) -> int:
        """Over blanks and the literal backslash-n some models write instead of newlines."""
        match = _LITERAL_NEWLINES.match(scan.text.raw, place, scan.end)
        return match.end() if match else place


_GLM = Pairs()

_SUFFIXED = re.compile(r"</?(?:tool_calls?|think|arg_key|arg_value)(:[0-9A-Za-z_\-]{1,32})>")


def with_suffix_of(text: Text) -> Format:
    """Hunyuan's markers carry a suffix per checkpoint (`<tool_call:6124c78e>`): take it from the text."""
    match = text.search(_SUFFIXED)
    return _hunyuan(match.group(1) if match else "")


@lru_cache(maxsize=64)
def _hunyuan(suffix: str) -> Format:
    def tags(name: str) -> tuple[str, str]:
        return f"<{name}{suffix}>", f"</{name}{suffix}>"

    opener, closer = tags("tool_call")
    think, end_think = tags("think")
    return Format(
        "hy_v3",
        Pairs(
            opener,
            closer,
            tags("arg_key"),
            tags("arg_value"),
            separator=f"<tool_sep{suffix}>",
            section_end=f"</tool_calls{suffix}>",
        ),
        reasoning=Reasoning(tuple({think, "<think>"}), tuple({end_think, "</think>"})),
        structure=tags("tool_calls"),
    )


FORMATS = (
    Format(
        "glm45", _GLM, aliases=("glm", "glm46", "glm4_moe", "glm4_5"), reasoning=THINK_IMPLICIT, models="GLM 4.5, 4.6"
    ),
    Format("glm47", _GLM, aliases=("glm5", "glm4_7", "glm47_moe"), reasoning=THINK_IMPLICIT, models="GLM 4.7, GLM 5"),
    Format("ling3", _GLM, aliases=("ling", "ling_3"), reasoning=THINK_IMPLICIT, models="Ling 3"),
    Format("poolside_v1", _GLM, aliases=("poolside", "laguna"), trim="verbatim", models="Poolside Laguna"),
    Format("spark25", _GLM, aliases=("spark2_5", "spark"), models="Spark 2.5"),
    Format(
        "iquest_q1",
        replace(_GLM, opener="<iquest_tool_call>", closer="</iquest_tool_call>"),
        aliases=("iquest",),
        models="IQuest Q1",
    ),
    Format("hy_v3", _GLM, aliases=("hunyuan_v3", "hy3"), adapt=with_suffix_of, models="Hunyuan 3"),
    Format(
        "hy_v4", _GLM, aliases=("hunyuan_v4", "hy4"), adapt=with_suffix_of, models="Hunyuan 4 (markers with a suffix)"
    ),
    Format(
        "k2_horizon",
        Pairs(
            "<ifm|tool_call>",
            "</ifm|tool_call>",
            ("<ifm|arg_key>", "</ifm|arg_key>"),
            ("<ifm|arg_value>", "</ifm|arg_value>"),
            kind=("<ifm|arg_type>", "</ifm|arg_type>"),
            json_body=True,
        ),
        aliases=("k2_v3", "k2"),
        reasoning=Reasoning(
            ("<ifm|think>", "<ifm|think_fast>", "<ifm|think_faster>"),
            ("</ifm|think>", "</ifm|think_fast>", "</ifm|think_faster>"),
        ),
        structure=("<ifm|tool_calls>", "</ifm|tool_calls>"),
        joined=True,
        models="K2-Horizon",
    ),
)
