"""Parsers by name, by the markers in a text (`auto`), and by the source of a chat template."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tool_parsers.engine import Parser
from tool_parsers.formats import FORMATS
from tool_parsers.response_template import format_from
from tool_parsers.spec import Format, Parsed, Start
from tool_parsers.text import Text


@dataclass(frozen=True)
class Signature:
    """A format is meant when all of these markers occur and none of those."""

    name: str
    all_of: tuple[str, ...]
    none_of: tuple[str, ...] = ()

    def fits(self, text: str) -> bool:
        """Whether the text carries this signature."""
        return all(marker in text for marker in self.all_of) and not any(marker in text for marker in self.none_of)


_UNIQUE = (
    Signature("kimi_k2", ("<|tool_call_argument_begin|>",)),
    Signature("kimi_k3", ("<|open|>", "<|sep|>")),
    Signature("minimax_m3", ("]<]minimax[>[",)),
    Signature("minimax_m2", ("<minimax:tool_call>",)),
    Signature("deepseek_v32", ("｜DSML｜", "function_calls")),
    Signature("deepseek_v4", ("｜DSML｜",)),
    Signature("gigachat35", ("｜GCML｜",)),
    Signature("deepseek_v31", ("<｜tool▁call▁begin｜>",), ("```json", "function<｜tool▁sep｜>")),
    Signature("deepseek_v3", ("<｜tool▁call▁begin｜>",)),
    Signature("step3", ("<steptml:",)),
    Signature("muse_glimmer", ("<atem:",)),
    Signature("beam", ("<rfl:parameter",)),
    Signature("solar_open", ("<|tool_call:args|>",)),
    Signature("harmony", ("<|channel|>", "<|message|>")),
    Signature("harmony", (" to=functions.",)),
    Signature("plamo3", ("<|plamo:",)),
    Signature("k2_horizon", ("<ifm|",)),
    Signature("inkling", ("<|content_invoke_tool",)),
    Signature("seed_oss", ("<seed:tool_call>",)),
    Signature("iquest_q1", ("<iquest_tool_call>",)),
    Signature("dots", ("<dots_function_call>",)),
    Signature("longcat", ("<longcat_tool_call>",)),
    Signature("apertus", ("<|tools_prefix|>",)),
    Signature("nemotron_v2", ("<TOOLCALL>",)),
    Signature("cohere_command4", ("<|START_ACTION|>", "<|START_TEXT|>")),
    Signature("cohere_command3", ("<|START_ACTION|>",)),
    Signature("mistral", ("[TOOL_CALLS]",)),
    Signature("gemma4", ("<|tool_call>",)),
    Signature("functiongemma", ("<start_function_call>",)),
    Signature("lfm2", ("<|tool_call_start|>",)),
    Signature("internlm", ("<|plugin|>",)),
    Signature("gigachat3", ("function call<|role_sep|>",)),
    Signature("gigachat3", ("<|function_call|>",)),
    Signature("granite_20b_fc", ("<function_call>",)),
    Signature("granite", ("<|tool_call|>",)),
    Signature("llama4_pythonic", ("<|python_start|>",)),
    Signature("minicpm5", ("<function name=",)),
    Signature("qwen3_coder", ("<function=", "<parameter=")),
)
"""In these tables what stands first is more specific than what stands below it."""
_IN_TEXT = (
    *_UNIQUE,
    Signature("apriel16", ("[BEGIN FINAL RESPONSE]",)),
    Signature("hy_v3", ("<tool_calls", "<tool_call", "<arg_key")),
    Signature("hy_v3", ("<tool_sep",)),
    Signature("glm45", ("<tool_call>", "<arg_key>")),
    Signature("jamba", ("<tool_calls>",)),
    Signature("llama3_json", ("<|python_tag|>",)),
    Signature("phi4_mini_json", ("functools[",)),
    Signature("cohere_command_r_plus", ("Action:", "```json")),
)
_IN_TEMPLATE = (
    *_UNIQUE,
    Signature("gigachat3", ("message_sep", "function call")),
    Signature("lfm2", ("<|tool_list_start|>",)),
    Signature("functionary_v32", (">>>", "all\\n")),
    Signature("functionary_v32", (">>>all",)),
    Signature("hy_v3", ("<tool_sep",)),
    Signature("hy_v3", ("tool_sep", "arg_key")),
    Signature("poolside_v1", ("<arg_key>", "</assistant>")),
    Signature("ling3", ("<arg_key>", "<|role_end|>")),
    Signature("spark25", ("<arg_key>", "<｜end▁of▁sentence｜>")),
    Signature("glm45", ("<arg_key>",)),
    Signature("functionary_v31", ("<function=",)),
    Signature("apriel16", ("<tool_calls>", "[BEGIN FINAL RESPONSE]")),
    Signature("apriel15", ("<tool_calls>[",)),
    Signature("minimax_m1", ("<tool_calls>",)),
    Signature("firefunction_v2", ("functools",)),
    Signature("cohere_command_r_plus", ("Action:",)),
    Signature("reka_edge", ("<tool_call>", "<sep>")),
    Signature("granite4", ("<tool_call>", "<|start_of_role|>")),
    Signature("granite", ("<|tool_call|>",)),
    Signature("granite", ("<|start_of_role|>", "tool")),
    Signature("hermes", ("<tool_call>",)),
    Signature("llama3_json", ("<|python_tag|>",)),
    Signature("llama3_json", ("<|start_header_id|>", "parameters")),
)
_PLAIN_TAG = re.compile(r"<tool_call>\s*+(.?)")
_SECTION = re.compile(r">>>[^\s<>{]{1,256}\n\s*+\{")
_BARE_OBJECT = re.compile(
    r"(?:\A|</think>)\s*+(?:```[a-z]{0,8}\s*+)?\[?\s*+\{\s*+[\"'](?:name|tool_name|type|function)[\"']"
)
_BARE_CALLS = re.compile(r"\[\s*+[A-Za-z_][\w.]{0,255}+\(\s*+(?:\)|[A-Za-z_]\w{0,255}+\s{0,8}=)")


def format_of_text(text: Text) -> str:
    """The name of the format a model's text is written in; `plain` when it shows no call."""
    raw = text.raw
    for signature in _IN_TEXT:
        if signature.fits(raw):
            return signature.name
    tag = _PLAIN_TAG.search(raw)
    if tag is not None:
        return "glm47" if re.match(r"[A-Za-z_]", tag.group(1)) else "hermes"
    if "<function=" in raw:
        return "functionary_v31" if re.search(r"<function=[^<>\n]{1,256}>\s{0,20}\{", raw) else "qwen3_coder"
    if "<function_calls>" in raw:
        return "olmo3"
    if _SECTION.search(raw):
        return "functionary_v32"
    if _BARE_OBJECT.search(raw):
        return "xlam" if re.search(r"(?:\A|</think>)\s*+(?:```[a-z]{0,8}\s*+)?\[", raw) else "llama3_json"
    return "pythonic" if _BARE_CALLS.search(raw) else "plain"


def format_of_template(source: str) -> str | None:
    """The name of the parser for a chat template, or None when the template writes no calls."""
    return next((signature.name for signature in _IN_TEMPLATE if signature.fits(source)), None)


class UnknownParser(ValueError):
    """No parser has this name; the message gives the nearest names."""

    def __init__(self, name: str, nearest: Sequence[str]) -> None:
        self.name = name
        self.nearest = tuple(nearest)
        hint = f"; nearest: {', '.join(nearest)}" if nearest else ""
        super().__init__(f"no parser is named {name!r}{hint} (list_parsers() has them all)")


def _key(name: str) -> str:
    return re.sub(r"[\s.\-]+", "_", name.strip().lower())


_BY_NAME: dict[str, Format] = {}
for _form in FORMATS:
    for _alias in (_form.name, *_form.aliases):
        _BY_NAME.setdefault(_key(_alias), _form)


def _recognised(text: Text) -> Format:
    return _BY_NAME[format_of_text(text)]


AUTO = Format("auto", None, aliases=("detect",), adapt=_recognised, models="recognised from the markers in the text")
_BY_NAME["auto"] = AUTO


def list_parsers(aliases: bool = False) -> list[str]:
    """The names of all formats, optionally with their aliases."""
    names = {form.name for form in (*FORMATS, AUTO)}
    if aliases:
        names |= set(_BY_NAME)
    return sorted(names)


def get_parser(
    name: str | None = None,
    *,
    template: str | None = None,
    response_template: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Parser:
    """The parser of this name or alias, or for a chat template's source, or for a tokenizer's `response_template`.

    `strict=True` turns every repair into an error.
    """
    if name is None and response_template is not None:
        return Parser(format_from(response_template), strict)
    if name is None:
        if template is None:
            raise TypeError("get_parser needs a name, a template or a response_template")
        name = format_of_template(template) or "plain"
    form = _BY_NAME.get(_key(name))
    if form is None:
        raise UnknownParser(name, difflib.get_close_matches(_key(name), sorted(_BY_NAME), n=3, cutoff=0.5))
    return Parser(form, strict)


def parse(
    text: str, parser: str, tools: Sequence[Any] | None = None, start: Start | None = "content", *, strict: bool = False
) -> Parsed:
    """Parse one text with the parser of this name."""
    return get_parser(parser, strict=strict).parse(text, tools, start)
