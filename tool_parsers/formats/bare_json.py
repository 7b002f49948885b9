"""Grammar C: JSON call objects that stand in the text with no marker, or with an optional one before them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from tool_parsers.readers.json_calls import JsonCalls
from tool_parsers.shapes import Keys
from tool_parsers.spec import Format, Reading, Scan

_KEY = r"""["'](?:name|tool_name|function|type|id|parameters|arguments)["']\s{0,20}+:"""
_OBJECT = re.compile(r"\{\s*+" + _KEY)
_LIST = re.compile(r"\[\s*+\{\s*+" + _KEY + r"|\{\s*+" + _KEY)
_FENCE_BEFORE = re.compile(r"```[a-z]{0,16}+\s*+(?=[\[{])")


@dataclass(frozen=True)
class BareJson:
    """Objects that look like calls, separated by `;`, blanks or an optional marker."""

    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    lists: bool = False
    """Whether a list of objects counts too."""

    @cached_property
    def inner(self) -> JsonCalls:
        """Reads what stands at an object."""
        return JsonCalls(self.openers, (), Keys(name=("name", "tool_name"), arguments_required=True), fence=True)

    def find(self, scan: Scan, start: int) -> int:
        """The next marker, fence or object that looks like a call."""
        places = [scan.first(self.openers, start)[0]]
        match = scan.text.search(_LIST if self.lists else _OBJECT, start)
        places.append(match.start() if match is not None else -1)
        fence = scan.text.search(_FENCE_BEFORE, start)
        places.append(fence.start() if fence is not None else -1)
        return min((place for place in places if 0 <= place < scan.end), default=-1)

    def read(self, scan: Scan, start: int) -> Reading | None:
        """Read the objects there; text that only looked like a call is left alone."""
        text = scan.text
        marker = next((opener for opener in self.openers if text.at(opener, start)), "")
        inside = start + len(marker)
        place = text.skip_blanks(inside)
        if marker and text.raw[place : place + 1] not in ("{", "[", "`"):
            return None
        reading = self.inner.read_body(scan, start, inside)
        if not marker and all(call.error and call.complete for call in reading.calls):
            # Without a marker only a whole call is proof that this JSON is a call and not data.
            return None
        closer = next((c for c in self.closers if text.at(c, text.skip_blanks(reading.end))), "")
        if closer:
            reading.end = text.skip_blanks(reading.end) + len(closer)
        return reading


_LLAMA = BareJson(("<|python_tag|>",))

FORMATS = (
    Format(
        "llama3_json",
        _LLAMA,
        aliases=("llama3", "llama3_1", "llama3_2"),
        structure=("<|eom_id|>", "<|eot_id|>"),
        trim="verbatim",
        models="Llama 3.1, 3.2, 3.3",
    ),
    Format(
        "llama4_json", _LLAMA, aliases=("llama4",), structure=("<|eom|>", "<|eot|>"), trim="verbatim", models="Llama 4"
    ),
    Format(
        "xlam",
        BareJson(("[TOOL_CALLS]", "<tool_call>"), ("</tool_call>",), lists=True),
        models="xLAM",
    ),
    Format(
        "granite_20b_fc",
        JsonCalls(("<function_call>",)),
        aliases=("granite_20b", "granite-20b-fc"),
        models="Granite 20B function calling",
    ),
    Format(
        "internlm",
        JsonCalls(("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"), ("<|action_end|>",)),
        aliases=("internlm2", "interns1", "intern_s1"),
        structure=("<|im_end|>",),
        models="InternLM 2 / 2.5 / 3, Intern-S1",
    ),
    Format(
        "gigachat3",
        JsonCalls(
            ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "<|function_call|>", "function call<|role_sep|>\n"),
            keys=Keys(arguments_required=True),
        ),
        aliases=("gigachat", "gigachat31"),
        structure=("</s>", "<|message_sep|>"),
        models="GigaChat 3, 3.1",
    ),
)
