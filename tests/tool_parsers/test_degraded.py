"""Markers that models lose, repeat, misspell or write where none belongs: the call is read, no marker becomes text."""

# ruff: noqa: E501 - markers and cases stand on one line each

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tool_parsers import Parsed, get_parser

CITY = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "default": None},
                },
            },
        },
    }
]


def parsed(parser: str, text: str, start: Any = None) -> Parsed:
    return get_parser(parser).parse(text, CITY, start)


def calls(result: Parsed) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in result.good_calls]


OSLO = [("weather", {"city": "Oslo"})]
P = "<|plamo:{}:plamo|>".format
PLAMO_CALL = f'{P("begin_tool_request")}{P("begin_tool_name")}weather{P("end_tool_name")}{P("begin_tool_arguments")}{{"city": "Oslo"}}{P("end_tool_arguments")}{P("end_tool_request")}'


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        ("plamo3", f"{P('end_think')}One{P('end_think')} two", "One two"),
        ("plamo3", f"One{P('end_tool_request')} two{P('end_tool_requests')}<|plamo:eot|>", "One two"),
        ("plamo3", f"One <|plamo:msg|>two{P('begin_tool_name')}", "One two"),
        ("inkling", "One two<|content_model_end_sampling|>", "One two"),
        ("dots", "One two</dots_function_call>", "One two"),
        ("inkling", "<|content_tool_error|>no such tool<|end_message|>", "no such tool"),
        ("inkling", "<|content_invoke_tool_text|>just words<|end_message|>", "just words"),
    ],
)  # fmt: skip
def test_stray_markers_are_not_content(parser: str, text: str, content: str) -> None:
    result = parsed(parser, text)
    assert (result.content + result.trailing, result.calls) == (content, ())


@pytest.mark.parametrize(
    ("parser", "text", "content"),
    [
        ("plamo3", f"Hm.{P('end_tool_requests')}{P('begin_tool_requests')}{P('begin_tool_requests')}{PLAMO_CALL}{P('end_tool_requests')}{P('end_tool_requests')}", "Hm."),
        ("inkling", 'weather<|content_invoke_tool_json|>{"name": "weather", "args": {"city": "Oslo"}}<|content_model_end_sampling|>', ""),
        ("deepseek_v4", 'Hm.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>', "Hm."),
        ("deepseek_v4", 'Hm.\n\n<｜DSML｜toolcalls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', "Hm."),
        ("deepseek_v4", '<｜DSML｜tool_call>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>', ""),
        ("deepseek_v4", 'Hm.\n\n<｜DSML｜ tool_calls>\n<｜DSML｜ invoke name="weather">\n<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ tool_calls>', "Hm."),
        ("mistral", 'Hm.[TOOL_CALLS][TOOL_CALLS]weather[ARGS]{"city": "Oslo"}', "Hm."),
        ("mistral", 'Hm.[TOOL_CALLS] [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]', "Hm."),
        ("deepseek_v4", '<｜DSML｜tool>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>', ""),
    ],
)  # fmt: skip
def test_a_call_among_degraded_markers_is_read(parser: str, text: str, content: str) -> None:
    result = parsed(parser, text)
    assert (calls(result), result.content + result.trailing) == (OSLO, content)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("city", ["Oslo ", "Oslo, a<b>", "Oslo</｜DSML｜parameter\n"])
def test_the_next_parameter_closes_the_one_before(city: str, known: bool) -> None:
    text = f'<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">{city}<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter></｜DSML｜invoke>'
    result = get_parser("deepseek_v4").parse(text, CITY if known else None)
    assert calls(result) == [("weather", {"city": city, "days": 3})]
    assert result.calls[0].repaired == ("missing_closer",)


def test_a_wrapper_is_opened_only_when_it_holds_arguments_of_the_tool() -> None:
    template = '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="arguments" string="false">{}</｜DSML｜parameter></｜DSML｜invoke>'
    assert calls(parsed("deepseek_v4", template.format('{"city": "Oslo"}'))) == OSLO
    other = [("weather", {"arguments": {"planet": "Mars"}})]
    assert calls(parsed("deepseek_v4", template.format('{"planet": "Mars"}'))) == other


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n<parameter=unit>\nNone\n</parameter>\n</function>\n</tool_call>"),
        ("minicpm5", '<function name="weather"><param name="city">Oslo</param><param name="unit">None</param></function>'),
        ("glm45", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>null</arg_value>\n</tool_call>"),
        ("deepseek_v32", '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter><｜DSML｜parameter name="unit" string="false">null</｜DSML｜parameter></｜DSML｜invoke>'),
        ("gemma4", '<|tool_call>call:weather{city:<|"|>Oslo<|"|>,unit:None}<tool_call|>'),
    ],
)  # fmt: skip
def test_a_parameter_whose_default_is_null_can_be_null(parser: str, text: str) -> None:
    assert calls(parsed(parser, text)) == [("weather", {"city": "Oslo", "unit": None})]


M = "]<]minimax[>["


def test_an_element_named_like_the_group_is_an_argument() -> None:
    text = f'{M}<tool_call>{M}<invoke name="f">{M}<o>{M}<tool_call>v{M}</tool_call>{M}</o>{M}<tool_call>w{M}</tool_call>{M}</invoke>{M}</tool_call>'
    assert calls(parsed("minimax_m3", text)) == [("f", {"o": {"tool_call": "v"}, "tool_call": "w"})]


def test_a_group_after_an_open_element_is_not_an_element() -> None:
    call = f'{M}<tool_call>{M}<invoke name="weather">{M}<city>Oslo{M}</city>{M}</invoke>{M}</tool_call>'
    assert calls(parsed("minimax_m3", f'{M}<tool_call>{M}<invoke name="f">{M}<o>{call}')) == OSLO


@pytest.mark.parametrize("wrapper", ["arguments", "properties"])
@pytest.mark.parametrize("inner", ['{"city": "Oslo"}', "{'city': 'Oslo'}"])
def test_minicpm_arguments_in_one_parameter_are_taken_out(wrapper: str, inner: str) -> None:
    text = f'<function name="weather"><param name="{wrapper}">{inner}</param></function>'
    assert calls(parsed("minicpm5", text)) == OSLO


def test_glyphs_of_the_tokenizer_are_not_content() -> None:
    assert parsed("minicpm5", "IĠlookĠitĠup.ĊThen:").content == "I look it up.\nThen:"
    assert parsed("minicpm5", "The glyph Ġ is a blank.").content == "The glyph Ġ is a blank."


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ("tags={'a', 'b'}", {"tags": ["a", "b"]}),
        ("tags={1,}, rest={}", {"tags": [1], "rest": {}}),
        ("tags=set(), rest=dict( ), more=[list(), tuple()]", {"tags": [], "rest": {}, "more": [[], []]}),
        ("""command='python -c "import os\nprint(os.path.join('a', 'b'))"'""", {"command": "python -c \"import os\nprint(os.path.join('a', 'b'))\""}),
        ("""command='python3 -c "print(f(sep='-'))"', n=1""", {"command": "python3 -c \"print(f(sep='-'))\"", "n": 1}),
        ("""command='awk '{print $1}' x', n=[2]""", {"command": "awk '{print $1}' x", "n": [2]}),
    ],
)  # fmt: skip
def test_python_text_with_sets_and_quotes_inside_quotes(arguments: str, wanted: dict[str, Any]) -> None:
    result = parsed("lfm2", f"<|tool_call_start|>[run({arguments})]<|tool_call_end|>")
    assert calls(result) == [("run", wanted)]


def test_nested_sets_are_read_once() -> None:
    text = "<|tool_call_start|>[run(a=" + "{" * 50 + "1" + "}" * 50 + ")]<|tool_call_end|>"
    assert len(calls(parsed("lfm2", text))) == 1


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>", "I look.\nIt rains."),
        ("<|channel|>commentary to=assistant<|message|>a note<|call|><|start|>assistant<|channel|>final<|message|>It rains.", "It rains."),
        ('<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final {"answer": 1}<|return|>', ' {"answer": 1}'),
    ],
)  # fmt: skip
def test_harmony_messages_that_are_no_calls(text: str, content: str) -> None:
    result = parsed("harmony", text)
    assert (result.content, result.calls) == (content, ())


def test_harmony_preambles_and_calls_are_told_apart() -> None:
    text = '<|channel|>commentary<|message|>One.<|end|><|start|>assistant to=functions.weather<|channel|>commentary<|message|>{"city": "Oslo"}<|call|><|start|>assistant<|channel|>final<|message|>Two.'
    result = parsed("harmony", text)
    assert (calls(result), result.content) == (OSLO, "One.\nTwo.")


def k3(side: str, name: str, blank: str) -> str:
    return f"<|{side}|>{blank}{name}{blank}<|sep|>"


@pytest.mark.parametrize("blank", ["", " ", "\n"])
def test_kimi_k3_markers_with_blanks_inside(blank: str) -> None:
    argument = f'<|open|>{blank}argument key="city" type="string"{blank}<|sep|>Oslo{k3("close", "argument", blank)}'
    call = f'<|open|>{blank}call tool="weather" index="1"{blank}<|sep|>{argument}{k3("close", "call", blank)}'
    said = f"{k3('open', 'think', blank)}hm{k3('close', 'think', blank)}{k3('open', 'response', blank)}Look.{k3('close', 'response', blank)}"
    result = parsed(
        "kimi_k3",
        f"{said}{k3('open', 'tools', blank)}{call}{k3('close', 'tools', blank)}{k3('close', 'message', blank)}",
    )
    assert (result.reasoning, result.content + result.trailing, calls(result)) == ("hm", "Look.", OSLO)


def test_kimi_k3_attributes_may_hold_any_text() -> None:
    text = '<|open|>tools<|sep|><|open|>call index="1" tool="a<|sep|>b"<|sep|><|open|>argument key="x<y>&quot;" type="number"<|sep|>1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    assert calls(parsed("kimi_k3", text)) == [("a<|sep|>b", {'x<y>"': 1})]


def test_kimi_k3_arguments_as_one_json_block() -> None:
    text = '<|open|>tools<|sep|><|open|>call tool="weather"<|sep|><|open|>json type="object"<|sep|>{"city": "Oslo"}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>'
    assert calls(parsed("kimi_k3", text)) == OSLO


def test_kimi_k3_answers_at_once_where_the_prompt_opened_the_thinking() -> None:
    said = "<|open|>response<|sep|>Yes.<|close|>response<|sep|>"
    result = parsed("kimi_k3", said, "reasoning")
    assert (result.reasoning, result.content) == ("", "Yes.")
    result = parsed("kimi_k3", f"<|open|>think<|sep|>hm<|close|>think<|sep|>{said}", "reasoning")
    assert (result.reasoning, result.content) == ("hm", "Yes.")


@pytest.mark.parametrize(
    ("parser", "empty"),
    [
        ("hermes", "<tool_call></tool_call>"),
        ("qwen3_coder", "<tool_call>\n</tool_call>"),
        ("glm47", "<tool_call></tool_call>"),
        ("gemma4", "<|tool_call><tool_call|>"),
        ("seed_oss", "<seed:tool_call></seed:tool_call>"),
    ],
)
def test_an_empty_pair_of_markers_is_an_error_and_not_content(parser: str, empty: str) -> None:
    result = parsed(parser, f"Before.{empty}After.")
    assert (result.content + result.trailing, result.calls, len(result.errors)) == ("Before.After.", (), 1)


@pytest.mark.parametrize("parser", ["harmony", "beam"])
def test_a_message_the_prompt_began_is_ended_by_its_marker(parser: str) -> None:
    text = " and so on.<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    result = parsed(parser, text, "reasoning")
    assert (result.reasoning, result.content) == (" and so on.", "Done.")
    assert "<|" not in parsed(parser, text, "content").content


@pytest.mark.parametrize("size", [4, 9, 20])
def test_a_marker_that_the_end_of_the_text_cut_off_is_not_content(size: int) -> None:
    opened = "<|plamo:end_think:plamo|>Before.<|plamo:begin_tool_requests:plamo|>"
    parsed = get_parser("plamo3").parse(opened + "<|plamo:begin_tool_request:plamo|>"[:size])
    assert (parsed.content, parsed.calls) == ("Before.", ())


def test_what_only_looks_like_the_beginning_of_a_marker_is_content() -> None:
    for text in ("a <|p", "write <|plamo: to begin", "a < b"):
        assert get_parser("plamo3").parse(text).content == text


@pytest.mark.parametrize(
    ("parser", "text", "reasoning", "content"),
    [
        ("muse", "<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>", "Hm.", "Yes."),
        ("muse_glimmer", "<|message|>Hm.<|eom|><|start|>assistant to=user<|message|> Yes.<|eot|>", "", "Hm. Yes."),
        ("muse", "to=self<|message|>Hm.<|start|>assistant to=user<|message|>Yes.", "Hm.", "Yes."),
        ("muse", " to=developer<|message|>a note<|eom|><|start|>assistant to=user<|message|>Yes.<|eot|>", "", "Yes."),
        ("muse", "to=commentary<|message|>I look. to=developer<|message|>a note<|eom|>", "", "I look. "),
    ],
)
def test_muse_messages_without_recipient_or_end(parser: str, text: str, reasoning: str, content: str) -> None:
    result = parsed(parser, text)
    assert (result.reasoning, result.content, result.calls) == (reasoning, content, ())


MUSE_CALL = 'to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n<atem:parameter name="city">Oslo</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'


@pytest.mark.parametrize("parser", ["muse", "muse_glimmer"])
def test_a_muse_thought_without_an_end_ends_at_the_call_and_an_answer_does_not(parser: str) -> None:
    result = parsed(parser, f"to=self<|message|>I look. {MUSE_CALL}<|eom|>")
    assert (calls(result), result.reasoning) == (OSLO, "I look. ")
    shown = f"to=user<|message|>Write {MUSE_CALL}"
    assert (parsed(parser, shown).calls, parsed(parser, shown).content) == ((), f"Write {MUSE_CALL}")


@pytest.mark.parametrize(
    ("parser", "text"),
    [("plamo3", "Hm.<|plamo:end_thi"), ("qwen3_coder", "<think>Hm.</thi"), ("minimax_m3", "<mm:think>Hm.</mm:th")],
)
def test_a_closer_that_the_end_of_the_text_cut_off_is_no_thought(parser: str, text: str) -> None:
    assert parsed(parser, text, "reasoning").reasoning == "Hm."


def test_the_published_table_names_these_tests() -> None:
    published = (Path(__file__).parents[2] / "tool_parsers" / "FORMATS.md").read_text()
    tests = {name for name in globals() if name.startswith("test_")} - {"test_the_published_table_names_these_tests"}
    assert set(re.findall(r"`(test_\w+)`", published)) == tests
