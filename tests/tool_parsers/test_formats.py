"""Quirks of single formats that the common hazards do not reach."""

# ruff: noqa: E501 - markers and cases stand on one line each

from __future__ import annotations

from typing import Any

import pytest

from tool_parsers import Parsed, get_parser

CITY = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]


def parsed(parser: str, text: str, tools: list[Any] | None = None, start: Any = "content") -> Parsed:
    return get_parser(parser).parse(text, tools, start)


def calls(result: Parsed) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in result.good_calls]


PARIS = [("weather", {"city": "Paris"})]


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("mistral", '[TOOL_CALLS]weather{"city": "Paris"}'),
        ("mistral", '[TOOL_CALLS]weather[CALL_ID]abc123def[ARGS]{"city": "Paris"}'),
        ("mistral", '[TOOL_CALLS] [{"arguments": {"city": "Paris"}, "name": "weather", "id": "abc123def"}]'),
        ("kimi_k2", '<|tool_call_section_begin|><|tool_call_begin|>weather:3<|tool_call_argument_begin|>{"city": "Paris"}'),
        ("kimi_k2", '<|tool_call_begin|>0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'),
        ("kimi_k2", 'functions.weather:0<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|><|tool_calls_section_end|>'),
        ("llama3_json", 'Here it is: {"name": "weather", "parameters": {"city": "Paris"}} Anything else?'),
        ("llama3_json", '{"type": "function", "name": "weather", "parameters": {"city": "Paris"}}'),
        ("internlm", '<|action_start|> <|plugin|>\n{"name": "weather", "parameters": {"city": "Paris"}}<|action_end|>'),
        ("gigachat3", 'Hi<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "weather", "arguments": {"city": "Paris"}}</s>'),
        ("granite", '<tool_call>[{"name": "weather", "arguments": {"city": "Paris"}}] done'),
        ("xlam", '</think>[{"name": "weather", "arguments": {"city": "Paris"}}]'),
        ("xlam", '```json\n[{"name": "weather", "arguments": {"city": "Paris"}}]\n```'),
        ("xlam", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}]'),
        ("xlam", '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'),
        ("qwen3_coder", "<function=weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</function>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>"),
        ("minimax_m2", '<invoke name="weather"><parameter name="city">Paris</parameter></invoke>'),
        ("dots", '<dots_function_call>{"name": "weather", "arguments": {"city": "Paris"}}</dots_function_call>'),
        ("deepseek_v32", '<｜DSML｜invoke name="weather">{"city": "Paris"}</｜DSML｜invoke>'),
        ("deepseek_v4", '<｜DSML｜ calls>\n<｜DSML｜invoke name="weather"><｜DSML｜parameter name="city">Paris</｜DSML｜parameter></｜DSML｜invoke>\n</｜DSML｜ calls>'),
        ("deepseek_v32", '<｜DSML｜invoke name="weather"><｜DSML｜parameter name="arguments" string="false">{"city": "Paris"}</｜DSML｜parameter></｜DSML｜invoke>'),
        ("minicpm5", '<functionname="weather"><param name="city"><![CDATA[Paris]]></param></function>'),
        ("minicpm5", '<functionĠname="weather"><paramĠname="city">Paris</param></function>'),
        ("glm45", "<tool_call>weather\\n<arg_key>city</arg_key>\\n<arg_value>Paris</arg_value>\\n</tool_call>"),
        ("k2_horizon", '<ifm|tool_calls><ifm|tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</ifm|tool_call></ifm|tool_calls>'),
        ("k2_horizon", "<ifm|tool_call>weather<ifm|arg_key>city</ifm|arg_key><ifm|arg_type>string</ifm|arg_type><ifm|arg_value>Paris</ifm|arg_value></ifm|tool_call>"),
        ("pythonic", "[weather(city='Paris')]"),
        ("pythonic", "I will look it up.\n[weather(city='Paris')]"),
        ("olmo3", '<function_calls>\nweather(city="Paris")\n</function_calls>'),
        ("lfm2", '<|tool_call_start|>[{"name": "weather", "arguments": {"city": "Paris"}}]<|tool_call_end|>'),
        ("gemma4", '<|tool_call>:weather{city:<|"|>Paris<|"|>}<tool_call|>'),
        ("gemma4", 'call:weather{city:<|"|>Paris<|"|>}<tool_call|>'),
        ("harmony", ' to=functions.weather<|channel|>analysis<|message|>{"city": "Paris"}'),
        ("harmony", '<|channel|>commentary to=functions.weather <|constrain|>json{"city": "Paris"}<|call|>'),
        ("harmony", '<|channel|>commentary to=weather code<|message|>{"city": "Paris"}'),
        ("functionary_v32", 'all\nOne moment.>>>weather\n{"city": "Paris"}'),
        ("functionary_v32", 'weather\n{"city": "Paris"}'),
        ("apertus", '<|tools_prefix|>[{"weather": {"city": "Paris"}}]'),
        ("apriel16", 'steps\n[BEGIN FINAL RESPONSE]\n<tool_calls>[{"name": "weather", "arguments": {"city": "Paris"}}]</tool_calls>'),
        ("hermes", '<tool_call>\n{"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}\n</tool_call>'),
    ],
)  # fmt: skip
def test_spellings_seen_in_the_wild_are_read(parser: str, text: str) -> None:
    assert calls(parsed(parser, text, CITY, None)) == PARIS


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("llama3_json", '{"name": "Alice", "age": 7}'),
        ("llama3_json", 'The record is {"name": "Alice"} as asked.'),
        ("pythonic", "Call it as [weather(city='Paris')] in your code."),
        ("pythonic", "See [the docs](https://example.org) and a[0](x)."),
        ("hermes", "Put the call between <tool_call> tags."),
        ("mistral", "A message without calls."),
        ("muse_glimmer", ' to=user<|message|>Write <atem:invoke name="weather"><atem:parameter name="city">X</atem:parameter></atem:invoke>'),
        ("functionary_v32", "Hello\nworld"),
        ("harmony", "<|channel|>final<|message|>Say to=functions.weather aloud."),
    ],
)  # fmt: skip
def test_text_that_only_looks_like_a_call_is_text(parser: str, text: str) -> None:
    result = parsed(parser, text, CITY)
    assert result.calls == ()
    assert result.content


def test_nested_elements_become_objects_and_lists() -> None:
    mark = "]<]minimax[>["
    text = f'{mark}<tool_call>{mark}<invoke name="f">{mark}<o>{mark}<a>1{mark}</a>{mark}<l>{mark}<item>x{mark}</item>{mark}</l>{mark}</o>{mark}</invoke>{mark}</tool_call>'
    assert calls(parsed("minimax_m3", text)) == [("f", {"o": {"a": 1, "l": ["x"]}})]


def test_trinity_counts_calls_inside_thinking() -> None:
    text = '<think>now <tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call></think>Done.'
    assert calls(parsed("trinity", text)) == PARIS
    assert calls(parsed("hermes", text)) == []


def test_citations_are_removed_from_answers() -> None:
    text = "<|START_RESPONSE|>It is <co>18 degrees</co: 0:[1,2]> now.<|END_RESPONSE|>"
    assert parsed("cohere_command3", text).content == "It is 18 degrees now."


def test_one_think_closer_too_many_stays_text() -> None:
    result = parsed("hermes", "<think>a</think>Use </think> to close.")
    assert (result.reasoning, result.content) == ("a", "Use </think> to close.")


def test_a_think_closer_inside_arguments_is_data() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>'
    for start in ("content", None):
        assert calls(parsed("hermes", call, None, start)) == [("f", {"a": "</think>"})]
    assert calls(parsed("hermes", f"<think>x</think>{call}")) == [("f", {"a": "</think>"})]
    assert calls(parsed("kimi_k2", "<think>go<|tool_call_begin|>f:0<|tool_call_argument_begin|>" + '{"a": "</think>"}<|tool_call_end|>')) == [("f", {"a": "</think>"})]  # fmt: skip


@pytest.mark.parametrize(
    ("parser", "draft", "real"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\nx",
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm47",
            "<tool_call>f<arg_key>a</arg_key><arg_value>x",
            "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
        ),
        (
            "hermes",
            '<tool_call>{"name": "f", "arguments": {"a": "x',
            '<tool_call>{"name": "f", "arguments": {"a": "1"}}</tool_call>',
        ),
    ],
)
def test_a_draft_that_breaks_off_in_thinking_swallows_nothing(parser: str, draft: str, real: str) -> None:
    result = parsed(parser, f"<think>maybe {draft}</think>\n{real}")
    assert calls(result) == [("f", {"a": "1"})]
    assert result.reasoning.startswith("maybe")


def test_several_thoughts_are_joined() -> None:
    result = parsed("hermes", "<think>one</think>text<think>two</think>end")
    assert (result.reasoning, result.content) == ("one\ntwo", "textend")


def test_an_unfinished_thought_is_all_reasoning() -> None:
    result = parsed("hermes", '<think>maybe <tool_call>{"name": "f", "arguments": {}}</tool_call> or not, let me see')
    assert result.calls == ()
    assert result.content == ""


def test_kimi_headers_without_an_index_are_malformed() -> None:
    result = parsed("kimi_k2", '<|tool_call_begin|>functions.x<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>')
    assert result.calls == ()
    assert "names no tool" in result.errors[0].message


def test_degenerate_repetition_is_cut_short_and_said() -> None:
    result = parsed("hermes", "<tool_call>{x}</tool_call>" * 2000)
    assert len(result.errors) < 1000
    assert "repeats" in result.errors[-1].message


def test_lone_surrogates_in_the_text_are_replaced() -> None:
    result = parsed("hermes", 'a\ud800b<tool_call>{"name": "f", "arguments": {"x": "\udfff"}}</tool_call>')
    assert result.content == "a�b"
    assert result.calls[0].arguments == {"x": "�"}
    result.calls[0].raw.encode()
