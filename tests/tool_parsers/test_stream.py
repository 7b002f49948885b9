"""Streaming: the same outcome as parsing the whole text, however it is split."""

# ruff: noqa: E501 - markers and cases stand on one line each

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.parsers_corpus import records
from support.parsers_writers import TOOLS, WRITERS, Writer
from tool_parsers import ToolCall, get_parser

every_format = pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.parser)


def streamed(parser: str, pieces: list[str], tools: object, start: object) -> tuple[list[ToolCall], object]:
    stream = get_parser(parser).stream(tools, start)  # type: ignore[arg-type]
    early = [call for piece in pieces for call in stream.feed(piece)]
    return early, stream.finish()


def pieces_of(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("parser", sorted({record["parser"] for record in records()}))
def test_the_corpus_streams_to_the_same_outcome(parser: str) -> None:
    for record in (record for record in records() if record["parser"] == parser):
        text, start = record["input_text"], record.get("start_state")
        whole = get_parser(parser).parse(text, record["tools"], start)
        early, finished = streamed(parser, pieces_of(text, random.Random(record["id"])), record["tools"], start)
        assert finished == whole, record["id"]
        assert tuple(early) == whole.calls[: len(early)], record["id"]


@every_format
def test_every_single_cut_gives_the_same_outcome(writer: Writer) -> None:
    text = (
        "Hi.\n"
        + writer.write([("write_file", {"path": "a", "content": f"x {writer.markers[0]} y"}), ("now", {})])
        + "\nBye."
        + " words" * 30
    )
    whole = get_parser(writer.parser).parse(text, TOOLS)
    for cut in range(0, len(text) + 1, 7):
        early, finished = streamed(writer.parser, [text[:cut], text[cut:]], TOOLS, "content")
        assert finished == whole
        assert tuple(early) == whole.calls[: len(early)], cut


def test_a_finished_call_comes_before_the_turn_ends() -> None:
    stream = get_parser("hermes").stream()
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert stream.feed(call) == []
    assert [found.name for found in stream.feed("\nand then" + " words" * 30)] == ["f"]
    assert stream.feed(" more " + call) == []
    assert [found.span for found in stream.feed(" words" * 30)] == [stream.finish().calls[1].span]


FRAGMENTS = [
    "words " * 25,
    "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', "<think>", "</think>", "<function=f>", "</function>",
    "<parameter=a>", "</parameter>", "\n", " ", "text", "[TOOL_CALLS]", "f[ARGS]", '{"a": "', "<arg_key>a</arg_key>", "<arg_value>",
    "</arg_value>", "f", '"', "}", "{", "[", "]", "f(a=1)", "<|python_start|>", "<|tool_call>call:f{a:1}", "<tool_call|>",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    st.sampled_from(["hermes", "qwen3_coder", "glm47", "mistral", "llama3_json", "pythonic", "gemma4", "kimi_k2"]),
    st.sampled_from(["content", "reasoning", None]),
)
def test_any_mix_of_markers_streams_to_the_same_outcome(parts: list[str], parser: str, start: str | None) -> None:
    text = "".join(parts)
    whole = get_parser(parser).parse(text, None, start)  # type: ignore[arg-type]
    for pieces in (parts, list(text)):
        early, finished = streamed(parser, pieces, None, start)
        assert finished == whole
        assert tuple(early) == whole.calls[: len(early)]
