"""Grammar E: a tag per call and a tag per parameter; values are text, typed from the schema."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from tool_parsers.readers.tagged import Tagged
from tool_parsers.schema import items_of, json_or_text, properties_of, typed, types_of
from tool_parsers.segments import harmony, muse, muse_glimmer
from tool_parsers.spec import THINK_IMPLICIT, Format, Reading, Reasoning, Scan
from tool_parsers.text import Text

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
        return self.prefix + "<tool_call>"

    @cached_property
    def closer(self) -> str:
        return self.prefix + "</tool_call>"

    @cached_property
    def invoke(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.prefix) + r"""<invoke name=["']?([^"'>\n]{1,256})["']?>""")

    @cached_property
    def tag(self) -> re.Pattern[str]:
        prefix = re.escape(self.prefix)
        # `<tool_call>` opens a group only before an invoke; elsewhere it is an element of that name.
        return re.compile(rf"{prefix}<(?!invoke |tool_call>\s*+{prefix}<invoke )([^<>/\n][^<>\n]{{0,255}})>")

    def find(self, scan: Scan, start: int) -> int:
        """The next group, or a call outside any group."""
        place = scan.find(self.opener, start)
        match = scan.text.search(self.invoke, start)
        if match is not None and match.start() < scan.end and (place < 0 or match.start() < place):
            return match.start()
        return place

    def read(self, scan: Scan, start: int) -> Reading | None:
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
        text_only = "string" in types_of(schema) <= {"string", "null"}
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


def _attribute(group: str, value: str = r"[^\"'<>\n]{1,256}") -> str:
    return rf"[\"']?(?P<{group}>{value}?)[\"']?"


_QWEN3 = Tagged(
    function=re.compile(r"<function=(?P<name>[^<>\n]{1,256})>"),
    function_ends=("</function>",),
    parameter=re.compile(r"<parameter=(?P<key>[^<>\n]{1,256})>"),
    parameter_end="</parameter>",
    openers=("<tool_call>",),
    closers=("</tool_call>",),
    trim_newline=True,
    prints_python=True,
)
_INVOKE = Tagged(
    function=re.compile(rf"<invoke name={_attribute('name')}\s{{0,8}}>"),
    function_ends=("</invoke>",),
    parameter=re.compile(rf"<parameter name={_attribute('key')}\s{{0,8}}>"),
    parameter_end="</parameter>",
    openers=("<minimax:tool_call>",),
    closers=("</minimax:tool_call>",),
)


def _markup(bar: str, sections: tuple[str, ...]) -> Tagged:
    """DeepSeek's DSML and its relatives: a marked tag, values typed by the attribute `string`."""
    return Tagged(
        function=re.compile(rf"<{bar}invoke name={_attribute('name')}\s{{0,8}}(?P<empty>/?)>"),
        function_ends=(f"</{bar}invoke>",),
        parameter=re.compile(
            rf"<{bar}parameter name={_attribute('key')}(?:\s{{1,8}}string=[\"'](?P<type>true|false)[\"'])?\s{{0,8}}>"
        ),
        parameter_end=f"</{bar}parameter>",
        openers=tuple(f"<{bar.strip()}{section}>" for section in sections),
        closers=tuple(f"</{bar.strip()}{section}>" for section in sections),
        own_markup=True,
        marker=f"<{bar}invoke",
        json_body=True,
        unwrap=("arguments", "input"),
        attribute_types=True,
    )


_DSML_SECTIONS = (
    *("function_calls", "tool_calls", " calls", "calls", "toolcalls", "tool"),
    *("tool_call", "function_call", " tool_calls", " tool_call", " function_calls"),
)
_DSML_BLANK = re.compile("<｜DSML｜ (?:invoke|parameter)")


@lru_cache
def _dsml(name: str, bar: str) -> Format:
    return Format(
        name,
        _markup(bar, _DSML_SECTIONS),
        trim="verbatim",
        trim_exactly="\n\n",
        structure=("<｜end▁of▁sentence｜>",),
    )


def _dsml_v4(text: Text) -> Format:
    """V4.1 writes a blank after the bar (`<｜DSML｜ invoke`), V4 does not."""
    return _dsml("deepseek_v4", "｜DSML｜ " if text.search(_DSML_BLANK) else "｜DSML｜")


_MINICPM = Tagged(
    function=re.compile(rf"<function[\sĠ]{{0,8}}name={_attribute('name')}\s{{0,8}}>"),
    function_ends=("</function>",),
    parameter=re.compile(rf"<param[\sĠ]{{0,8}}name={_attribute('key')}\s{{0,8}}>"),
    parameter_end="</param>",
    untyped="text",
    unwrap=("arguments", "properties"),
    prints_python=True,
    duplicates_are_errors=True,
)
_GLYPHS = re.compile("<(?:function|param)Ġname=")
_CDATA = re.compile(r"\s*+<!\[CDATA\[(.*)\]\]>\s*", re.DOTALL)


def without_cdata(value: str) -> str:
    """The text inside a CDATA section, or the value itself."""
    if "<![CDATA[" not in value:
        return value
    match = _CDATA.fullmatch(value)
    return match.group(1) if match else value


def without_glyphs(value: str) -> str:
    """A value whose blanks came out as the tokenizer's own glyphs."""
    return without_cdata(value.replace("Ġ", " ").replace("Ċ", "\n"))


def _minicpm(text: Text) -> Format:
    if text.search(_GLYPHS) or ("Ġ" in text.raw and " " not in text.raw):
        return Format("minicpm5", replace(_MINICPM, decode_value=without_glyphs), joined=True, clean=without_glyphs)
    return Format("minicpm5", replace(_MINICPM, decode_value=without_cdata), joined=True)


_K3_MARKER = re.compile(r"<\|(open|close)\|>\s{0,8}(think|response|tools|call|argument|json|message)\s{0,8}<\|sep\|>")
_K3_MAX_SPELLINGS = 40
_K3_ATTRIBUTES = r"(?:\s{1,8}(?!tool=|key=)\w{1,32}=\"[^\"\n]{0,256}\"){0,4}"


def _kimi_k3(text: Text) -> Format:
    """Kimi K3's markers are made of several tokens: blanks between them are taken as they were written."""
    spellings: Counter[tuple[str, str, str]] = Counter()
    match = text.search(_K3_MARKER)
    while match is not None:
        spellings[(match.group(1), match.group(2), match.group())] += 1
        match = text.search(_K3_MARKER, match.end())
    return _k3(tuple(spelling for spelling, _ in spellings.most_common(_K3_MAX_SPELLINGS)))


@lru_cache(maxsize=64)
def _k3(spellings: tuple[tuple[str, str, str], ...]) -> Format:
    def markers(side: str, *names: str) -> tuple[str, ...]:
        """How these markers are spelled in the text, the most frequent spelling first."""
        found = tuple(marker for at, name, marker in spellings if at == side and name in names)
        return found or tuple(f"<|{side}|>{name}<|sep|>" for name in names)

    return Format(
        "kimi_k3",
        Tagged(
            function=re.compile(
                rf"<\|open\|>\s{{0,8}}call{_K3_ATTRIBUTES}\s{{1,8}}tool=\"(?P<name>[^\"\n]{{1,256}})\""
                rf"{_K3_ATTRIBUTES}\s{{0,8}}<\|sep\|>"
            ),
            function_ends=markers("close", "call"),
            parameter=re.compile(
                r"<\|open\|>\s{0,8}argument\s{1,8}key=\"(?P<key>[^\"\n]{1,256})\""
                r"(?:\s{1,8}type=\"(?P<type>[a-z]{1,16})\")?[^<>\n]{0,64}\s{0,8}<\|sep\|>"
            ),
            parameter_end=markers("close", "argument")[0],
            openers=markers("open", "tools"),
            closers=markers("close", "tools"),
            json_block=re.compile(r"<\|open\|>\s{0,8}json\b[^<>\n]{0,64}<\|sep\|>"),
            json_block_ends=markers("close", "json"),
            marker="<|open|>call",
            attribute_types=True,
            unescape_attributes=True,
        ),
        reasoning=Reasoning(
            markers("open", "think"), markers("close", "think"), skipped_by=markers("open", "response")
        ),
        structure=(*markers("open", "response"), *markers("close", "response", "message"), "<|im_end|>"),
    )


_MUSE = Format(
    "muse_glimmer",
    Tagged(
        function=re.compile(rf"<atem:invoke name={_attribute('name')}\s{{0,8}}>"),
        function_ends=("</atem:invoke>",),
        parameter=re.compile(rf"<atem:parameter name={_attribute('key')}\s{{0,8}}>"),
        parameter_end="</atem:parameter>",
        openers=("<atem:function_calls>",),
        closers=("</atem:function_calls>",),
        untyped="json",
        repeated_name=True,
    ),
    segments=muse_glimmer,
    reasoning=None,
    joined=True,
    trim="verbatim",
    models="Muse Glimmer",
)

FORMATS = (
    Format(
        "qwen3_coder",
        _QWEN3,
        aliases=("qwen3_xml", "qwen3coder", "qwen3_5", "nanbeige", "minicpmv", "granite42", "granite4_2"),
        reasoning=THINK_IMPLICIT,
        trim="verbatim",
        models="Qwen3-Coder, Qwen3.5, Nanbeige, MiniCPM-V",
    ),
    Format(
        "nemotron_v3", _QWEN3, aliases=("nemotron3", "nemotron_nano_v3"), reasoning=THINK_IMPLICIT, models="Nemotron 3"
    ),
    Format("step3p5", _QWEN3, aliases=("step3_5",), reasoning=THINK_IMPLICIT, models="Step 3.5"),
    Format(
        "mimo",
        replace(_QWEN3, trim_newline=False),
        reasoning=THINK_IMPLICIT,
        trim="verbatim",
        models="MiMo (values verbatim)",
    ),
    Format(
        "seed_oss",
        replace(_QWEN3, openers=("<seed:tool_call>",), closers=("</seed:tool_call>",), trim_newline=False),
        aliases=("seed",),
        reasoning=Reasoning(("<seed:think>",), ("</seed:think>",)),
        models="Seed-OSS",
    ),
    Format("minimax_m2", _INVOKE, aliases=("minimax_m2_1",), reasoning=THINK_IMPLICIT, models="MiniMax M2"),
    Format(
        "dots",
        replace(_INVOKE, openers=("<dots_function_call>",), closers=("</dots_function_call>",), json_calls=True),
        structure=("<dots_function_call>", "</dots_function_call>"),
        models="dots",
    ),
    replace(_dsml("deepseek_v32", "｜DSML｜"), aliases=("deepseek_v3_2", "deepseekv32"), models="DeepSeek V3.2"),
    replace(
        _dsml("deepseek_v4", "｜DSML｜"),
        aliases=("deepseekv4", "deepseek_v41", "deepseek_v4_1"),
        adapt=_dsml_v4,
        models="DeepSeek V4, V4.1",
    ),
    Format("gigachat35", _markup("｜GCML｜", _DSML_SECTIONS), aliases=("gigachat3_5",), models="GigaChat 3.5"),
    Format(
        "step3",
        Tagged(
            function=re.compile(
                rf"(?:function)?(?:<｜tool_sep｜>)?<steptml:invoke name={_attribute('name')}\s{{0,8}}>"
            ),
            function_ends=("</steptml:invoke>",),
            parameter=re.compile(rf"<steptml:parameter name={_attribute('key')}\s{{0,8}}>"),
            parameter_end="</steptml:parameter>",
            openers=("<｜tool_call_begin｜>",),
            closers=("<｜tool_call_end｜>",),
        ),
        structure=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        models="Step 3",
    ),
    Format(
        "minicpm5",
        _MINICPM,
        aliases=("minicpm",),
        adapt=_minicpm,
        models="MiniCPM 5",
    ),
    _MUSE,
    replace(_MUSE, name="muse", segments=muse, aliases=("muse_spark",), models="Muse Spark"),
    Format(
        "beam",
        Tagged(
            function=re.compile(r"<rfl:invoke name=\"(?P<name>[^\"<>\n]{1,256})\">"),
            function_ends=("<|call|>", "<|end|>", "<|return|>", "</rfl:invoke>"),
            parameter=re.compile(rf"<rfl:parameter name={_attribute('key')}\s{{0,8}}>"),
            parameter_end="</rfl:parameter>",
            trim_newline=True,
            marker="<rfl:invoke",
            json_body=True,
        ),
        segments=harmony,
        reasoning=None,
        joined=True,
        models="Beam",
    ),
    replace(_k3(()), adapt=_kimi_k3, models="Kimi K3"),
    Format(
        "minimax_m3",
        Elements("]<]minimax[>["),
        reasoning=Reasoning(("<mm:think>",), ("</mm:think>",)),
        models="MiniMax M3",
    ),
)
