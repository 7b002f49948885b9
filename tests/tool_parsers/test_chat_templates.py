"""Round trip with the models' own chat templates: what the template writes, the parser named for it reads back."""

# ruff: noqa: E501 - markers and cases stand on one line each

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from support.chat_templates import template_files
from support.parsers_render import argument_style, turn
from support.parsers_writers import TOOLS, Call
from tool_parsers import get_parser

RENDERING = 57
"""Of the 70 templates, so many write tool calls; the others ignore them or raise."""

ONE_CALL_ONLY = {
    "GigaChat3-10B-A1.8B": "writes only the first call",
    "GigaChat3.1-10B-A1.8B": "writes only the first call",
    "meta-llama-Llama-3.1-8B-Instruct": "raises on more than one call",
    "meta-llama-Llama-3.2-3B-Instruct": "raises on more than one call",
    "meta-llama-Llama-3.3-70B-Instruct": "raises on more than one call",
    "openai-gpt-oss-120b": "writes only the first call",
}
NO_ESCAPES = {
    "LFM2.5-8B-A1B": "writes strings between quotes without escaping them",
}
NO_TYPES = {"MiniMax-M3": "writes the text `1` and the number 1 alike: only the schema tells them apart"}

TRICKY = [
    "", "plain", "  padded  ", "line1\nline2\n", "\nnewline first", "quotes \" and ' and \\ back\\slash \\n", "ünï 😀 日本", "it's",
    "</tool_call>", "</parameter> in </function> text", "</arg_value> x", "[TOOL_CALLS] x", "<|tool_call_end|> y", "```json\n{}\n```",
    '{"a": 1}', "[1,2]", "123", "true", "null", "<think>x</think>", "a\tb", "</invoke>", "<parameter=x> y", "</param>", "]", "}",
    "</seed:tool_call>", "<｜tool▁call▁end｜>", "<|call|>", "<tool_call>", "</atem:parameter>", "</｜DSML｜parameter>", "<|END_ACTION|>",
]  # fmt: skip


def templates() -> list[Path]:
    return [path for path in template_files() if argument_style(path) is not None]


def read_back(path: Path, calls: list[Call]) -> list[tuple[str, dict[str, Any]]]:
    style = argument_style(path)
    assert style is not None
    text = turn(path, calls, as_text=style)
    parser = get_parser(template=path.read_text())
    return [(call.name, call.arguments) for call in parser.parse(text, TOOLS, None).good_calls]


def test_so_many_templates_write_calls() -> None:
    assert len(templates()) == RENDERING


def test_every_template_that_writes_calls_has_a_parser() -> None:
    assert {get_parser(template=path.read_text()).name for path in templates()}.isdisjoint({"plain"})


def test_a_template_without_calls_gets_the_plain_parser() -> None:
    assert get_parser(template="{{ messages[0].content }}").name == "plain"


def test_tricky_strings_come_back_exactly() -> None:
    losses: list[str] = []
    for path in templates():
        for value in TRICKY:
            if path.stem in NO_ESCAPES and set(value) & set("'\"\\"):
                continue
            calls: list[Call] = [("write_file", {"path": value, "count": 3, "options": {"a": True, "b": [value, "x"]}})]
            if read_back(path, calls) != calls:
                losses.append(f"{path.stem}: {calls}")
    assert losses == []


def test_several_calls_come_back_in_order() -> None:
    calls = [("write_file", {"path": "a", "count": -1}), ("now", {}), ("write_file", {"path": "b", "tags": ["x", "y"]})]
    losses = [path.stem for path in templates() if path.stem not in ONE_CALL_ONLY and read_back(path, calls) != calls]
    assert losses == []


def test_an_empty_call_comes_back() -> None:
    calls: list[Call] = [("now", {})]
    assert [path.stem for path in templates() if read_back(path, calls) != calls] == []


def test_the_named_losses_are_the_templates_own() -> None:
    two: list[Call] = [("write_file", {"path": "first"}), ("write_file", {"path": "second"})]
    for path in templates():
        if path.stem in ONE_CALL_ONLY:
            try:
                text = turn(path, two, as_text=bool(argument_style(path)))
            except Exception:  # noqa: BLE001, S112 - the template's own refusal, whatever its type
                continue
            assert "second" not in text
        if path.stem in NO_ESCAPES:
            assert "'a'b'" in turn(path, [("write_file", {"path": "a'b"})], as_text=bool(argument_style(path)))


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=12)
scalars = words | st.sampled_from(TRICKY) | st.integers(-(10**9), 10**9) | st.booleans()
keys = st.text("abcdefghij_", min_size=1, max_size=6)
arguments = st.fixed_dictionaries(
    {"path": words | st.sampled_from(TRICKY)},
    optional={
        "content": words | st.sampled_from(TRICKY),
        "count": st.integers(-(10**9), 10**9),
        "flag": st.booleans(),
        "tags": st.lists(words | st.sampled_from(TRICKY), min_size=1, max_size=3),
        "options": st.dictionaries(keys, scalars | st.lists(scalars, max_size=3), min_size=1, max_size=3),
    },
)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.just("write_file"), arguments), min_size=1, max_size=3), st.data())
def test_random_calls_come_back_exactly(calls: list[Call], data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(templates()))
    if path.stem in ONE_CALL_ONLY:
        calls = calls[:1]
    text = repr(calls)
    assume(not (path.stem in NO_ESCAPES and ("'" in str(calls[0][1]["path"]) or "\\" in text or '"' in text)))
    if path.stem in NO_TYPES:
        calls = [(tool, {key: value for key, value in given.items() if key != "options"}) for tool, given in calls]
    assert read_back(path, calls) == calls, path.stem
