"""Grammar D: the name in a header, JSON arguments after it."""

from __future__ import annotations

import re

from tool_parsers.readers.headed import Headed
from tool_parsers.readers.json_calls import JsonCalls
from tool_parsers.segments import functionary, harmony
from tool_parsers.spec import THINK, THINK_IMPLICIT, Format, Reasoning

_KIMI_HEADER = re.compile(r"\s*+(?:functions\.)?(.{1,256}?)\s{0,8}:\s{0,8}\d{1,9}\s*+", re.DOTALL)
_DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜end▁of▁sentence｜>")
_KIMI_SECTION = (
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_section_begin|>",
    "<|tool_call_section_end|>",
    "<|im_end|>",
)
_PLAMO_PARTS = ("tool_requests", "tool_request", "tool_name", "tool_arguments", "think")
_PLAMO_MARKERS = (
    *(f"<|plamo:{side}_{part}:plamo|>" for part in _PLAMO_PARTS for side in ("begin", "end")),
    "<|plamo:constrain|>json<|plamo:msg|>",
    "<|plamo:msg|>",
    "<|plamo:tag|>",
    "<|plamo:eot|>",
    "<|plamo:bos|>",
)
_DEEPSEEK = Headed(
    ("<｜tool▁call▁begin｜>",),
    ("<｜tool▁sep｜>",),
    ("<｜tool▁call▁end｜>",),
    kind_words=("function",),
    fence=True,
    stop_at=("<｜tool▁calls▁end｜>",),
)


def kimi_name(header: str) -> str:
    """`functions.NAME:IDX` -> NAME; a bare counter stays as it is, anything else is not a name."""
    match = _KIMI_HEADER.fullmatch(header)
    if match is not None:
        return match.group(1)
    return header.strip() if header.strip().isdigit() else ""


def mistral_name(header: str) -> str:
    """The name without the call id that some versions write behind it."""
    return header.split("[CALL_ID]")[0].strip()


def solar_name(header: str) -> str:
    """The name behind the call id."""
    return header.rsplit("<|tool_call:name|>", 1)[-1].strip()


FORMATS = (
    Format(
        "deepseek_v3",
        _DEEPSEEK,
        aliases=("deepseek", "deepseekv3", "deepseek_r1", "deepseek_v3_0324"),
        structure=_DEEPSEEK_SECTION,
        reasoning=THINK,
        models="DeepSeek V3, R1",
    ),
    Format(
        "deepseek_v31",
        _DEEPSEEK,
        aliases=("deepseek_v3_1", "deepseekv31"),
        structure=_DEEPSEEK_SECTION,
        models="DeepSeek V3.1, V3.1-Terminus",
    ),
    Format(
        "kimi_k2",
        Headed(
            ("<|tool_call_begin|>",),
            ("<|tool_call_argument_begin|>",),
            ("<|tool_call_end|>",),
            name=kimi_name,
            orphan_header=re.compile(
                r"(?<![\w.|>])((?:functions\.)?[\w.\-]{1,200}:\d{1,9})(?=<\|tool_call_argument_begin\|>)"
            ),
            infer_from_keys=True,
            stop_at=_KIMI_SECTION[1:4:2],
        ),
        aliases=("kimi", "kimi_k2_thinking", "kimi_k2_5", "kimi_k2_7", "kimik2"),
        structure=_KIMI_SECTION,
        reasoning=Reasoning(("<think>", "◁think▷"), ("</think>", "◁/think▷"), implicit_end=True),
        models="Kimi K2 to K2.7",
    ),
    Format(
        "mistral",
        Headed(
            ("[TOOL_CALLS]",),
            ("[ARGS]",),
            name=mistral_name,
            arrays=JsonCalls(("[TOOL_CALLS]",)),
            brace_ends_header=True,
        ),
        aliases=("mistral_v11", "mistral_v13", "devstral", "magistral", "ministral"),
        structure=("</s>",),
        reasoning=Reasoning(("[THINK]",), ("[/THINK]",)),
        trim="strip",
        models="Mistral and Ministral of every tokenizer version",
    ),
    Format(
        "functionary_v31",
        Headed(("<function=",), (">",), ("</function>",)),
        aliases=("functionary", "functionary_v3_1", "llama3_function_tag"),
        structure=("<|eom_id|>", "<|eot_id|>"),
        models="functionary v3.1",
    ),
    Format(
        "functionary_v32",
        None,
        aliases=("functionary_v3_2",),
        reasoning=None,
        segments=functionary,
        structure=("<|eot_id|>",),
        models="functionary v3.2",
    ),
    Format(
        "harmony",
        None,
        aliases=("gpt_oss", "gptoss", "openai", "gpt-oss"),
        reasoning=None,
        segments=harmony,
        joined=True,
        between="\n",
        models="gpt-oss",
    ),
    Format(
        "solar_open",
        Headed(("<|tool_call:begin|>",), ("<|tool_call:args|>",), ("<|tool_call:end|>",), name=solar_name),
        aliases=("solar",),
        structure=("<|tool_calls|>", "<|calls|>", "<|end|>", "<|begin|>assistant"),
        reasoning=Reasoning(("<|think|>",), ("<|end|>",), orphan_closer=False),
        models="Solar Open",
    ),
    Format(
        "plamo3",
        Headed(
            ("<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>", "<|plamo:begin_tool_name:plamo|>"),
            (
                "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
                "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:msg|>",
                "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>",
            ),
            ("<|plamo:end_tool_arguments:plamo|>",),
        ),
        aliases=("plamo",),
        structure=_PLAMO_MARKERS,
        reasoning=Reasoning(("<|plamo:begin_think:plamo|>",), ("<|plamo:end_think:plamo|>",)),
        models="PLaMo 3",
    ),
    Format(
        "kimi_vl",
        None,
        reasoning=Reasoning(("◁think▷",), ("◁/think▷",)),
        models="Kimi-VL (thinking only, no calls)",
    ),
    Format("plain", None, aliases=("none", "text"), reasoning=THINK_IMPLICIT, models="models without tool calls"),
)
