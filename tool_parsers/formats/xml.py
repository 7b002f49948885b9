"""Grammar E: a tag per call and a tag per parameter; values are text, typed from the schema."""

from __future__ import annotations

import re
from dataclasses import replace

from tool_parsers.readers.elements import Elements
from tool_parsers.readers.tagged import Tagged
from tool_parsers.segments import harmony, muse
from tool_parsers.spec import THINK_IMPLICIT, Format, Reasoning
from tool_parsers.text import Text


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
        openers=tuple(f"<{bar}{section}>" for section in sections),
        closers=tuple(f"</{bar}{section}>" for section in sections),
        marker=f"<{bar}invoke",
        json_body=True,
        unwrap=("arguments", "input"),
        attribute_types=True,
    )


_DSML_SECTIONS = ("function_calls", "tool_calls", " calls", "calls")
_MINICPM = Tagged(
    function=re.compile(rf"<function[\sĠ]{{0,8}}name={_attribute('name')}\s{{0,8}}>"),
    function_ends=("</function>",),
    parameter=re.compile(rf"<param[\sĠ]{{0,8}}name={_attribute('key')}\s{{0,8}}>"),
    parameter_end="</param>",
    untyped="text",
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
    decode = without_glyphs if text.search(_GLYPHS) else without_cdata
    return Format("minicpm5", replace(_MINICPM, decode_value=decode), joined=True)


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
        models="dots",
    ),
    Format(
        "deepseek_v32",
        _markup("｜DSML｜", _DSML_SECTIONS),
        aliases=("deepseek_v3_2", "deepseekv32"),
        trim="verbatim",
        trim_exactly="\n\n",
        structure=("<｜end▁of▁sentence｜>",),
        models="DeepSeek V3.2",
    ),
    Format(
        "deepseek_v4",
        _markup("｜DSML｜", _DSML_SECTIONS),
        aliases=("deepseekv4", "deepseek_v41", "deepseek_v4_1"),
        trim="verbatim",
        trim_exactly="\n\n",
        structure=("<｜end▁of▁sentence｜>",),
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
    Format(
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
        aliases=("muse",),
        segments=muse,
        reasoning=None,
        joined=True,
        trim="verbatim",
        models="Muse Glimmer",
    ),
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
    Format(
        "kimi_k3",
        Tagged(
            function=re.compile(r"<\|open\|>call tool=\"(?P<name>[^\"<>\n]{1,256})\"[^<>\n]{0,64}<\|sep\|>"),
            function_ends=("<|close|>call<|sep|>",),
            parameter=re.compile(
                r"<\|open\|>argument key=\"(?P<key>[^\"<>\n]{1,256})\""
                r"(?: type=\"(?P<type>[a-z]{1,16})\")?[^<>\n]{0,64}<\|sep\|>"
            ),
            parameter_end="<|close|>argument<|sep|>",
            openers=("<|open|>tools<|sep|>",),
            closers=("<|close|>tools<|sep|>",),
            attribute_types=True,
            unescape_attributes=True,
        ),
        reasoning=Reasoning(("<|open|>think<|sep|>",), ("<|close|>think<|sep|>",)),
        structure=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>", "<|im_end|>"),
        models="Kimi K3",
    ),
    Format(
        "minimax_m3",
        Elements("]<]minimax[>["),
        reasoning=Reasoning(("<mm:think>",), ("</mm:think>",)),
        models="MiniMax M3",
    ),
)
