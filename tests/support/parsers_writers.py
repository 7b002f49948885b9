"""Writes calls the way each model does, so that one hazard can be tried on every format."""

# ruff: noqa: E501 - markers and cases stand on one line each

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = tuple[str, dict[str, Any]]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write_file",
            "description": "Write a file.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "content": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "flag": {"type": "boolean"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "options": {
                        "type": "object",
                        "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"type": "string"}}},
                    },
                },
                "required": ["path"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "The time.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
]


@dataclass(frozen=True)
class Writer:
    """How one format writes calls, and what is special about it."""

    parser: str
    write: Callable[[list[Call]], str]
    markers: tuple[str, ...]
    """Markers that must be data inside a value."""
    broken: str
    """One call of this format that cannot be read."""
    think: tuple[str, str] | None = ("<think>", "</think>")
    joined: bool = False
    start: str = "content"
    separator: str = ""
    """What stands between calls when they are written one at a time."""
    empty_ok: bool = True


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else dumps(value)


def each(template: str, *, name_key: str = "name", arguments_key: str = "arguments") -> Callable[[list[Call]], str]:
    """One JSON object per call, put in place of `%` in the template."""
    return lambda calls: "".join(template.replace("%", dumps({name_key: n, arguments_key: a}), 1) for n, a in calls)


def listed(before: str, after: str, **keys: str) -> Callable[[list[Call]], str]:
    """One JSON array for all calls."""
    name, arguments = keys.get("name", "name"), keys.get("arguments", "arguments")
    return lambda calls: before + dumps([{name: n, arguments: a} for n, a in calls]) + after


def headed(pattern: str, before: str = "", after: str = "") -> Callable[[list[Call]], str]:
    """A header with `NAME` and `INDEX`, arguments in place of `{}`."""

    def write(calls: list[Call]) -> str:
        parts = [
            pattern.replace("NAME", n).replace("INDEX", str(i)).replace("{}", dumps(a))
            for i, (n, a) in enumerate(calls)
        ]
        return before + "".join(parts) + after

    return write


def tagged(
    call: tuple[str, str], parameter: tuple[str, str], before: str = "", after: str = "", typed: bool = False
) -> Callable[[list[Call]], str]:
    """Tags with `NAME` and `KEY`; `TYPE` becomes whether the value is a string."""

    def write(calls: list[Call]) -> str:
        out = before
        for name, arguments in calls:
            out += call[0].replace("NAME", name)
            for key, value in arguments.items():
                opener = parameter[0].replace("KEY", key)
                if typed:
                    opener = opener.replace("TYPE", "true" if isinstance(value, str) else "false")
                    opener = opener.replace("KIND", _kind(value))
                out += opener + _text(value) + parameter[1]
            out += call[1]
        return out + after

    return write


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def python(before: str, after: str) -> Callable[[list[Call]], str]:
    """`[f(a=1), g()]`."""

    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return lambda calls: before + "[" + ", ".join(one(n, a) for n, a in calls) + "]" + after


def gemma(opener: str, closer: str, quote: str) -> Callable[[list[Call]], str]:
    def literal(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, dict):
            return "{" + ",".join(f"{k}:{literal(v)}" for k, v in value.items()) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(literal, value)) + "]"
        return dumps(value)

    return lambda calls: "".join(f"{opener}call:{n}{literal(a)}{closer}" for n, a in calls)


def elements(calls: list[Call]) -> str:
    mark = "]<]minimax[>["

    def xml(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(f"{mark}<{k}>{xml(v)}{mark}</{k}>" for k, v in value.items())
        if isinstance(value, list):
            return "".join(f"{mark}<item>{xml(v)}{mark}</item>" for v in value)
        return _text(value)

    body = "".join(f'{mark}<invoke name="{n}">{xml(a)}{mark}</invoke>\n' for n, a in calls)
    return f"{mark}<tool_call>\n{body}{mark}</tool_call>"


_QWEN = tagged(
    ("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>\n"), ("<parameter=KEY>\n", "\n</parameter>\n")
)
_QWEN_MARKERS = ("</parameter>", "</function>", "</tool_call>", "<tool_call>", "<function=x>")
_QWEN_BROKEN = "<tool_call>\n<function>\n</function>\n</tool_call>\n"
_GLM = tagged(("<tool_call>NAME", "</tool_call>"), ("<arg_key>KEY</arg_key><arg_value>", "</arg_value>"))
_GLM_MARKERS = ("</arg_value>", "</tool_call>", "<arg_key>", "<tool_call>")
_BAD = '{"name": "write_file", "arguments": {"path" "a", ]]}'


def _dsml(section: str, bar: str = "｜DSML｜") -> Callable[[list[Call]], str]:
    return tagged(
        (f'<{bar}invoke name="NAME">\n', f"</{bar}invoke>\n"),
        (f'<{bar}parameter name="KEY" string="TYPE">', f"</{bar}parameter>\n"),
        f"<{bar}{section}>\n",
        f"</{bar}{section}>",
        typed=True,
    )


WRITERS = [
    Writer("hermes", each("<tool_call>\n%\n</tool_call>\n"), ("</tool_call>", "<tool_call>"), f"<tool_call>{_BAD}</tool_call>"),
    Writer("longcat", each("<longcat_tool_call>%</longcat_tool_call>"), ("</longcat_tool_call>",), f"<longcat_tool_call>{_BAD}</longcat_tool_call>"),
    Writer("granite4", each("<tool_call>\n%\n</tool_call>\n"), ("</tool_call>",), f"<tool_call>{_BAD}</tool_call>", joined=True),
    Writer("reka_edge", each("<tool_call>\n%\n</tool_call>"), ("</tool_call>",), f"<tool_call>{_BAD}</tool_call>", joined=True),
    Writer("ernie45", each("<tool_call>\n%\n</tool_call>\n"), ("</tool_call>",), f"<tool_call>{_BAD}</tool_call>"),
    Writer("trinity", each("<tool_call>\n%\n</tool_call>\n"), ("</tool_call>",), f"<tool_call>{_BAD}</tool_call>", think=None),
    Writer("inkling", each("<|message_model|><|content_invoke_tool_json|>%<|end_message|>", arguments_key="args"), ("<|end_message|>",), f"<|message_model|><|content_invoke_tool_json|>{_BAD}<|end_message|>", think=("<|content_thinking|>", "<|end_message|>"), joined=True),
    Writer("minimax_m1", lambda calls: "<tool_calls>\n" + "\n".join(dumps({"name": n, "arguments": a}) for n, a in calls) + "\n</tool_calls>", ("</tool_calls>",), f"<tool_calls>{_BAD}</tool_calls>"),
    Writer("granite", listed("<|tool_call|>", ""), ("<|tool_call|>",), f"<|tool_call|>[{_BAD}]"),
    Writer("jamba", listed("<tool_calls>", "</tool_calls>"), ("</tool_calls>",), f"<tool_calls>[{_BAD}]</tool_calls>"),
    Writer("apriel15", listed("<tool_calls>", "</tool_calls>"), ("</tool_calls>",), f"<tool_calls>[{_BAD}]</tool_calls>"),
    Writer("hunyuan_a13b", listed("<tool_calls>", "</tool_calls>"), ("</tool_calls>",), f"<tool_calls>[{_BAD}]</tool_calls>"),
    Writer("nemotron_v2", listed("<TOOLCALL>", "</TOOLCALL>"), ("</TOOLCALL>",), f"<TOOLCALL>[{_BAD}]</TOOLCALL>"),
    Writer("phi4_mini_json", listed("functools", ""), ("functools[", "]"), f"functools[{_BAD}]"),
    Writer("firefunction_v2", listed(" functools", ""), ("]",), f" functools[{_BAD}]"),
    Writer("cohere_command3", listed("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name", arguments="parameters"), ("<|END_ACTION|>",), "<|START_ACTION|>[{bad}]<|END_ACTION|>", think=("<|START_THINKING|>", "<|END_THINKING|>")),
    Writer("cohere_command4", listed("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name", arguments="parameters"), ("<|END_ACTION|>",), "<|START_ACTION|>[{bad}]<|END_ACTION|>", think=("<|START_THINKING|>", "<|END_THINKING|>")),
    Writer("cohere_command_r_plus", listed("Action:\n```json\n", "\n```", name="tool_name", arguments="parameters"), ("```", "Action:"), "Action:\n```json\n[{bad}]\n```", think=None),
    Writer("apertus", lambda calls: "<|tools_prefix|>" + dumps([{n: a} for n, a in calls]) + "<|tools_suffix|>", ("<|tools_suffix|>",), "<|tools_prefix|>[{bad}]<|tools_suffix|>", think=("<|inner_prefix|>", "<|inner_suffix|>")),
    Writer("llama3_json", lambda calls: "; ".join(dumps({"name": n, "parameters": a}) for n, a in calls), ("<|python_tag|>", ";"), '{"name": "write_file", "parameters": {"path" "a"}} ', separator="; "),
    Writer("llama4_json", lambda calls: "<|python_tag|>" + ";".join(dumps({"name": n, "arguments": a}) for n, a in calls), ("<|python_tag|>",), '<|python_tag|>{"name": "write_file", "parameters": {"path" "a"}}'),
    Writer("xlam", listed("", ""), ("[TOOL_CALLS]", "]"), '[{"name": "write_file", "arguments": {"path" "a"}}]'),
    Writer("granite_20b_fc", each("<function_call> %"), ("<function_call>",), f"<function_call> {_BAD}"),
    Writer("internlm", each("<|action_start|><|plugin|>%<|action_end|>"), ("<|action_end|>",), f"<|action_start|><|plugin|>{_BAD}<|action_end|>"),
    Writer("gigachat3", each("<|function_call|>%"), ("<|function_call|>",), f"<|function_call|>{_BAD}"),
    Writer("deepseek_v3", headed("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{}\n```<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁call▁end｜>", "```"), "<｜tool▁call▁begin｜>function<｜tool▁sep｜>write_file\n```json\n{x\n```<｜tool▁call▁end｜>"),
    Writer("deepseek_v31", headed("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{}<｜tool▁call▁end｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁call▁end｜>",), "<｜tool▁call▁begin｜>write_file<｜tool▁sep｜>{x<｜tool▁call▁end｜>"),
    Writer("kimi_k2", headed("<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{}<|tool_call_end|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), ("<|tool_call_end|>", "<|tool_call_begin|>"), "<|tool_call_begin|>functions.write_file:0<|tool_call_argument_begin|>{x<|tool_call_end|>"),
    Writer("mistral", headed("[TOOL_CALLS]NAME[ARGS]{}"), ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]write_file[ARGS]{x", think=("[THINK]", "[/THINK]")),
    Writer("mistral", listed("[TOOL_CALLS]", ""), ("[TOOL_CALLS]",), f"[TOOL_CALLS][{_BAD}]", think=("[THINK]", "[/THINK]")),
    Writer("functionary_v31", headed("<function=NAME>{}</function>"), ("</function>",), "<function=write_file>{x</function>"),
    Writer("functionary_v32", headed(">>>NAME\n{}"), (">>>x\n",), ">>>write_file\n{x", think=None),
    Writer("harmony", headed("<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{}<|call|>"), ("<|call|>", "<|end|>"), "<|start|>assistant<|channel|>commentary to=functions.write_file<|message|>{x<|call|>", think=("<|channel|>analysis<|message|>", "<|end|>"), joined=True),
    Writer("solar_open", headed("<|tool_call:begin|>INDEX<|tool_call:name|>NAME<|tool_call:args|>{}<|tool_call:end|>", "<|tool_calls|>", "<|calls|>"), ("<|tool_call:end|>",), "<|tool_call:begin|>0<|tool_call:name|>write_file<|tool_call:args|>{x<|tool_call:end|>", think=("<|think|>", "<|end|>")),
    Writer("plamo3", headed("<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>", "<|plamo:begin_tool_requests:plamo|>", "<|plamo:end_tool_requests:plamo|>"), ("<|plamo:end_tool_arguments:plamo|>",), "<|plamo:begin_tool_name:plamo|>write_file<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>{x<|plamo:end_tool_arguments:plamo|>", think=("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>")),
    Writer("qwen3_coder", _QWEN, _QWEN_MARKERS, _QWEN_BROKEN),
    Writer("nemotron_v3", _QWEN, _QWEN_MARKERS, _QWEN_BROKEN),
    Writer("step3p5", _QWEN, _QWEN_MARKERS, _QWEN_BROKEN),
    Writer("mimo", tagged(("<tool_call>\n<function=NAME>\n", "</function>\n</tool_call>\n"), ("<parameter=KEY>", "</parameter>\n")), _QWEN_MARKERS, _QWEN_BROKEN),
    Writer("seed_oss", tagged(("<seed:tool_call>\n<function=NAME>\n", "</function>\n</seed:tool_call>\n"), ("<parameter=KEY>", "</parameter>\n")), ("</parameter>", "</function>", "</seed:tool_call>"), "<seed:tool_call>\n<function>\n</function>\n</seed:tool_call>", think=("<seed:think>", "</seed:think>")),
    Writer("minimax_m2", tagged(('<invoke name="NAME">\n', "</invoke>\n"), ('<parameter name="KEY">', "</parameter>\n"), "<minimax:tool_call>\n", "</minimax:tool_call>"), ("</parameter>", "</invoke>", "</minimax:tool_call>"), "<minimax:tool_call><invoke></invoke></minimax:tool_call>"),
    Writer("dots", tagged(('<invoke name="NAME">', "</invoke>"), ('<parameter name="KEY">', "</parameter>"), "<dots_function_call>", "</dots_function_call>"), ("</parameter>", "</invoke>"), "<dots_function_call><invoke></invoke></dots_function_call>"),
    Writer("deepseek_v32", _dsml("function_calls"), ("</｜DSML｜parameter>", "</｜DSML｜invoke>"), "<｜DSML｜function_calls><｜DSML｜invoke></｜DSML｜function_calls>"),
    Writer("deepseek_v4", _dsml("tool_calls"), ("</｜DSML｜parameter>", "</｜DSML｜tool_calls>"), "<｜DSML｜tool_calls><｜DSML｜invoke></｜DSML｜tool_calls>"),
    Writer("gigachat35", _dsml("function_calls", "｜GCML｜"), ("</｜GCML｜parameter>",), "<｜GCML｜function_calls><｜GCML｜invoke></｜GCML｜function_calls>"),
    Writer("step3", tagged(('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="NAME">', "</steptml:invoke><｜tool_call_end｜>"), ('<steptml:parameter name="KEY">', "</steptml:parameter>"), "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"), ("</steptml:parameter>", "</steptml:invoke>"), "<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke><｜tool_call_end｜>"),
    Writer("minicpm5", tagged(('<function name="NAME">', "</function>\n"), ('<param name="KEY">', "</param>")), ("</param>", "</function>"), '<function name="write_file"><param>x</param></function>', joined=True),
    Writer("muse_glimmer", tagged(('<|start|>assistant to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n', "</atem:invoke>\n</atem:function_calls><|eom|>"), ('<atem:parameter name="KEY">', "</atem:parameter>\n")), ("</atem:parameter>", "</atem:invoke>"), "<|start|>assistant to=write_file<|message|><atem:function_calls>\n<atem:invoke>x</atem:invoke>\n</atem:function_calls><|eom|>", think=("<|start|>assistant to=self<|message|>", "<|eom|>"), joined=True),
    Writer("muse", tagged(('<|start|>assistant to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n', "</atem:invoke>\n</atem:function_calls><|eom|>"), ('<atem:parameter name="KEY">', "</atem:parameter>\n")), ("</atem:parameter>", "</atem:invoke>"), "<|start|>assistant to=write_file<|message|><atem:function_calls>\n<atem:invoke>x</atem:invoke>\n</atem:function_calls><|eom|>", think=("<|start|>assistant to=self<|message|>", "<|eom|>"), joined=True),
    Writer("kimi_k3", tagged(('<|open|>call tool="NAME" index="1"<|sep|>', "<|close|>call<|sep|>"), ('<|open|>argument key="KEY" type="KIND"<|sep|>', "<|close|>argument<|sep|>"), "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", typed=True), ("<|close|>argument<|sep|>", "<|close|>call<|sep|>"), "<|open|>tools<|sep|><|open|>call<|sep|><|close|>call<|sep|><|close|>tools<|sep|>", think=("<|open|>think<|sep|>", "<|close|>think<|sep|>")),
    Writer("beam", tagged(("<|start|>assistant<|channel|>commentary to=functions.NAME<|message|>", "<|call|>"), ('<rfl:parameter name="KEY">\n', "\n</rfl:parameter>")), ("</rfl:parameter>",), "<|start|>assistant<|channel|>commentary to=functions.write_file<|message|>{x<|call|>", think=("<|channel|>analysis<|message|>", "<|end|>"), joined=True),
    Writer("minimax_m3", elements, ("</path>", "</invoke>"), ']<]minimax[>[<tool_call>]<]minimax[>[<invoke name="write_file">]<]minimax[>[<path>a]<]minimax[>[</wrong>]<]minimax[>[</invoke>]<]minimax[>[</tool_call>', think=("<mm:think>", "</mm:think>")),
    Writer("glm45", tagged(("<tool_call>NAME\n", "</tool_call>\n"), ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")), _GLM_MARKERS, "<tool_call>{}</tool_call>"),
    Writer("glm47", _GLM, _GLM_MARKERS, "<tool_call>{}</tool_call>"),
    Writer("ling3", _GLM, _GLM_MARKERS, "<tool_call>{}</tool_call>"),
    Writer("poolside_v1", _GLM, _GLM_MARKERS, "<tool_call>{}</tool_call>"),
    Writer("spark25", _GLM, _GLM_MARKERS, "<tool_call>{}</tool_call>"),
    Writer("iquest_q1", tagged(("<iquest_tool_call>NAME", "</iquest_tool_call>"), ("<arg_key>KEY</arg_key><arg_value>", "</arg_value>")), ("</arg_value>", "</iquest_tool_call>"), "<iquest_tool_call>{}</iquest_tool_call>"),
    Writer("hy_v3", tagged(("<tool_call>NAME<tool_sep>\n", "</tool_call>\n"), ("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n"), "<tool_calls>\n", "</tool_calls>"), ("</arg_value>", "</tool_call>", "</tool_calls>"), "<tool_call>{}</tool_call>"),
    Writer("hy_v4", tagged(("<tool_call:6124c78e>NAME<tool_sep:6124c78e>\n", "</tool_call:6124c78e>\n"), ("<arg_key:6124c78e>KEY</arg_key:6124c78e>\n<arg_value:6124c78e>", "</arg_value:6124c78e>\n"), "<tool_calls:6124c78e>\n", "</tool_calls:6124c78e>"), ("</arg_value:6124c78e>", "</tool_call:6124c78e>"), "<tool_call:6124c78e>{}</tool_call:6124c78e>", think=("<think:6124c78e>", "</think:6124c78e>")),
    Writer("k2_horizon", tagged(("<ifm|tool_call>NAME\n", "</ifm|tool_call>\n"), ("<ifm|arg_key>KEY</ifm|arg_key>\n<ifm|arg_value>", "</ifm|arg_value>\n"), "<ifm|tool_calls>\n", "</ifm|tool_calls>"), ("</ifm|arg_value>", "</ifm|tool_call>"), "<ifm|tool_call>{}</ifm|tool_call>", think=("<ifm|think>", "</ifm|think>"), joined=True),
    Writer("pythonic", python("<|python_start|>", "<|python_end|>"), ("]", ")", "[f(a=1)]"), "", joined=True),
    Writer("llama4_pythonic", python("<|python_start|>", "<|python_end|>"), ("<|python_end|>", ")]"), "<|python_start|>[write_file(path=)]<|python_end|>", joined=True),
    Writer("olmo3", python("<function_calls>", "</function_calls>"), ("</function_calls>",), "<function_calls>[write_file(path=)]</function_calls>"),
    Writer("lfm2", python("<|tool_call_start|>", "<|tool_call_end|>"), ("<|tool_call_end|>", ")]"), "<|tool_call_start|>[write_file(path=)]<|tool_call_end|>"),
    Writer("gemma4", gemma("<|tool_call>", "<tool_call|>", '<|"|>'), ("<tool_call|>", "<|tool_call>", "}", ","), "<|tool_call>call:write_file{path:<|\"|>a<|\"|> b<tool_call|>", think=("<|channel>thought\n", "<channel|>")),
    Writer("functiongemma", gemma("<start_function_call>", "<end_function_call>", "<escape>"), ("<end_function_call>", "}"), "<start_function_call>call:write_file{path<end_function_call>", think=None),
]  # fmt: skip
