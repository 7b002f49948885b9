"""Grammar C: JSON objects with at most a marker before them."""

from __future__ import annotations

from tool_parsers.readers.bare import BareJson
from tool_parsers.readers.json_calls import JsonCalls
from tool_parsers.shapes import Keys
from tool_parsers.spec import Format

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
