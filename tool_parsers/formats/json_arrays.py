"""Grammar B: a JSON array of calls after a marker."""

from __future__ import annotations

import re

from tool_parsers.readers.json_calls import JsonCalls
from tool_parsers.shapes import Keys
from tool_parsers.spec import Format, Reasoning

_TOOL_CALLS = JsonCalls(("<tool_calls>",), ("</tool_calls>",))
_CITATION = re.compile(r"</?co(?:>|: [^<>\n]{0,200}>)")
_COHERE = JsonCalls(
    ("<|START_ACTION|>",), ("<|END_ACTION|>",), Keys(name=("tool_name", "name"), arguments=("parameters", "arguments"))
)
_COHERE_THINKING = Reasoning(("<|START_THINKING|>",), ("<|END_THINKING|>",))


def without_citations(text: str) -> str:
    """Cohere's `<co>text</co: 0:[1]>` marks, reduced to their text."""
    return _CITATION.sub("", text) if "<" in text else text


FORMATS = (
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
