"""Grammar A: one JSON object per tag."""

from __future__ import annotations

import re

from tool_parsers.readers.json_calls import JsonCalls
from tool_parsers.shapes import Keys
from tool_parsers.spec import THINK_IMPLICIT, Format, Reasoning

_HERMES = JsonCalls(("<tool_call>",), ("</tool_call>",))
_INKLING_HEADER = re.compile(
    r"(?:<\|message_model\|>[^<]{0,256}+)?<\|content_invoke_tool_(?:json|text)\|>(?:[^<{]{0,256}+<\|content_invoke_tool_json\|>)?"
)

FORMATS = (
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
            ("<|end_message|>",),
            Keys(arguments=("args", "arguments", "parameters")),
            prefix=_INKLING_HEADER,
        ),
        reasoning=Reasoning(
            ("<|message_model|><|content_thinking|>", "<|content_thinking|>"), ("<|end_message|>",), orphan_closer=False
        ),
        structure=(
            "<|message_model|>",
            "<|content_text|>",
            "<|end_message|>",
            "<|message_user|>",
            "<|content_thinking|>",
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
