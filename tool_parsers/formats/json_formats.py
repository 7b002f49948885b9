"""Grammars A, B and C, all JSON: an object between tags, an array after a marker, or bare objects."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from tool_parsers.readers.json_calls import JsonCalls, Keys
from tool_parsers.spec import THINK_IMPLICIT, Format, Reading, Reasoning, Scan

_HERMES = JsonCalls(("<tool_call>",), ("</tool_call>",))
_INKLING_HEADER = re.compile(
    r"(?:<\|message_model\|>[^<]{0,256}+|\A[\w.\-]{1,256}+)?<\|content_invoke_tool_(?:json|text)\|>(?:[^<{]{0,256}+<\|content_invoke_tool_json\|>)?"
)

TAGGED = (
    Format(
        "hermes",
        _HERMES,
        aliases=(
            "qwen",
            "qwen25",
            "qwen2_5",
            "qwen3",
            "qwen3_json",
            "nous",
            "mimo_vl",
            "smollm3",
            "bielik",
        ),
        trim="strip",
        models="Hermes 2 / 3 / 4, Qwen2.5, Qwen3 instruct, QwQ, MiMo-VL, SmolLM3",
    ),
    Format(
        "trinity",
        _HERMES,
        reasoning=Reasoning(implicit_end=True, transparent=True),
        trim="strip",
        models="Arcee Trinity (calls may stand inside thinking)",
    ),
    Format(
        "longcat",
        JsonCalls(("<longcat_tool_call>",), ("</longcat_tool_call>",)),
        reasoning=Reasoning(("<longcat_think>", "<think>"), ("</longcat_think>", "</think>")),
        models="LongCat-Flash",
    ),
    Format("granite4", _HERMES, aliases=("granite4_1", "granite41"), joined=True, models="Granite 4.0, 4.1"),
    Format("reka_edge", _HERMES, aliases=("reka",), joined=True, models="Reka Edge"),
    Format(
        "ernie45",
        _HERMES,
        aliases=("ernie_45", "ernie"),
        structure=("<response>", "</response>"),
        models="ERNIE 4.5 thinking",
    ),
    Format(
        "inkling",
        JsonCalls(
            ("<|content_invoke_tool_json|>",),
            ("<|end_message|>", "<|content_model_end_sampling|>"),
            Keys(arguments=("args", "arguments", "parameters")),
            prefix=_INKLING_HEADER,
        ),
        reasoning=Reasoning(
            ("<|message_model|><|content_thinking|>", "<|content_thinking|>"),
            ("<|end_message|>", "<|content_model_end_sampling|>"),
            orphan_closer=False,
        ),
        structure=(
            "<|message_model|>",
            "<|content_text|>",
            "<|end_message|>",
            "<|message_user|>",
            "<|content_thinking|>",
            "<|content_model_end_sampling|>",
            "<|content_invoke_tool_text|>",
            "<|content_tool_error|>",
        ),
        joined=True,
        trim="verbatim",
        models="Inkling",
    ),
    Format(
        "minimax_m1",
        JsonCalls(("<tool_calls>",), ("</tool_calls>",)),
        aliases=("minimax",),
        reasoning=THINK_IMPLICIT,
        models="MiniMax M1 (one object per line)",
    ),
)


_TOOL_CALLS = JsonCalls(("<tool_calls>",), ("</tool_calls>",))
_CITATION = re.compile(r"</?co(?:>|: [^<>\n]{0,200}>)")
_COHERE = JsonCalls(
    ("<|START_ACTION|>",), ("<|END_ACTION|>",), Keys(name=("tool_name", "name"), arguments=("parameters", "arguments"))
)
_COHERE_THINKING = Reasoning(("<|START_THINKING|>",), ("<|END_THINKING|>",))


def without_citations(text: str) -> str:
    """Cohere's `<co>text</co: 0:[1]>` marks, reduced to their text."""
    return _CITATION.sub("", text) if "<" in text else text


ARRAYS = (
    Format(
        "granite",
        JsonCalls(("<|tool_call|>", "<tool_call>")),
        aliases=("granite3", "granite33", "granite_3"),
        reasoning=Reasoning(("<think>", "Here is my thought process:"), ("</think>", "Here is my response:")),
        structure=("<response>", "</response>"),
        models="Granite 3.0 to 3.3",
    ),
    Format("jamba", _TOOL_CALLS, models="Jamba 1.5"),
    Format("apriel15", _TOOL_CALLS, aliases=("apriel", "apriel_1_5"), models="Apriel 1.5"),
    Format(
        "apriel16",
        _TOOL_CALLS,
        aliases=("apriel_1_6",),
        reasoning=Reasoning(("Here are my reasoning steps:",), ("[BEGIN FINAL RESPONSE]",)),
        structure=("[END FINAL RESPONSE]", "<|end|>"),
        models="Apriel 1.6",
    ),
    Format(
        "hunyuan_a13b",
        _TOOL_CALLS,
        aliases=("hunyuan",),
        structure=("<answer>", "</answer>"),
        models="Hunyuan A13B",
    ),
    Format(
        "nemotron_v2",
        JsonCalls(("<TOOLCALL>",), ("</TOOLCALL>",)),
        aliases=("nemotron", "nemotron_json"),
        models="Nemotron Nano v2",
    ),
    Format(
        "phi4_mini_json", JsonCalls(("functools",)), aliases=("phi4_mini", "phi4"), trim="strip", models="Phi-4-mini"
    ),
    Format(
        "firefunction_v2", JsonCalls((" functools", "functools")), aliases=("firefunction",), models="FireFunction v2"
    ),
    Format(
        "cohere_command3",
        _COHERE,
        aliases=("command_r7b", "command_a", "cohere", "command3"),
        reasoning=_COHERE_THINKING,
        structure=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|END_OF_TURN_TOKEN|>"),
        clean=without_citations,
        models="Command R7B, Command A",
    ),
    Format(
        "cohere_command4",
        _COHERE,
        aliases=("command_a_plus", "cohere2_moe", "command4"),
        reasoning=_COHERE_THINKING,
        structure=("<|START_TEXT|>", "<|END_TEXT|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
        clean=without_citations,
        models="Command A+ and MoE",
    ),
    Format(
        "cohere_command_r_plus",
        JsonCalls(
            ("Action:",), keys=Keys(name=("tool_name", "name"), arguments=("parameters", "arguments")), fence=True
        ),
        aliases=("command_r_plus", "command_r"),
        reasoning=None,
        structure=("<|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>"),
        models="Command R, R+",
    ),
    Format(
        "apertus",
        JsonCalls(("<|tools_prefix|>",), ("<|tools_suffix|>",), Keys(single=True)),
        reasoning=Reasoning(("<|inner_prefix|>",), ("<|inner_suffix|>",)),
        models="Apertus",
    ),
)


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

BARE = (
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
