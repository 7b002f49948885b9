"""Names, aliases, recognition and the package's promises."""

# ruff: noqa: E501 - markers and cases stand on one line each

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tool_parsers
from support.parsers_corpus import complaints, records, refused
from support.parsers_writers import TOOLS, WRITERS, Writer
from tool_parsers import UnknownParser, get_parser, list_parsers, parse
from tool_parsers.formats import FORMATS

PEERS = [
    "hermes",
    "qwen",
    "qwen25",
    "qwen3_coder",
    "qwen3_xml",
    "mistral",
    "llama3",
    "llama3_json",
    "llama4_json",
    "llama4_pythonic",
    "pythonic",
    "glm45",
    "glm47",
    "glm",
    "deepseek_v3",
    "deepseekv3",
    "deepseek_v31",
    "deepseek_v3_1",
    "deepseekv31",
    "deepseek_v32",
    "deepseekv32",
    "deepseek_v4",
    "kimi_k2",
    "kimi_k3",
    "longcat",
    "harmony",
    "gpt-oss",
    "openai",
    "minimax",
    "minimax_m2",
    "minimax-m2",
    "minimax_m3",
    "gemma4",
    "functiongemma",
    "granite",
    "granite4",
    "granite-20b-fc",
    "internlm",
    "internlm2",
    "interns1",
    "jamba",
    "phi4_mini_json",
    "xlam",
    "step3",
    "step3p5",
    "seed_oss",
    "hunyuan_a13b",
    "hy_v3",
    "hy_v4",
    "ernie45",
    "olmo3",
    "lfm2",
    "mimo",
    "nemotron_v2",
    "nemotron_v3",
    "gigachat3",
    "gigachat35",
    "poolside_v1",
    "ling3",
    "spark25",
    "iquest_q1",
    "k2_horizon",
    "inkling",
    "muse",
    "muse_glimmer",
    "beam",
    "dots",
    "trinity",
    "apertus",
    "apriel15",
    "apriel16",
    "plamo3",
    "cohere_command3",
    "cohere_command4",
    "cohere_command_r_plus",
    "functionary_v31",
    "functionary_v32",
    "firefunction_v2",
    "minicpm5",
    "reka_edge",
    "auto",
]


@pytest.mark.parametrize("name", PEERS)
def test_the_names_of_the_peers_are_known(name: str) -> None:
    assert get_parser(name).parse("Hello.").content == "Hello."


def test_there_are_at_least_55_formats() -> None:
    assert len(list_parsers()) >= 55
    assert set(list_parsers()) < set(list_parsers(aliases=True))


def test_no_alias_is_claimed_twice() -> None:
    names = [name for form in FORMATS for name in (form.name, *form.aliases)]
    assert len(names) == len(set(names))


def test_an_unknown_name_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(UnknownParser, match="qwen3_coder") as refusal:
        get_parser("qwen3_codr")
    assert "qwen3_coder" in refusal.value.nearest


def test_a_parser_needs_something_to_go_by() -> None:
    with pytest.raises(TypeError, match="template"):
        get_parser()


def test_parse_is_the_short_way() -> None:
    assert parse("[f(a=1)]", "pythonic").calls[0].arguments == {"a": 1}


def test_what_is_exported_exists() -> None:
    assert all(hasattr(tool_parsers, name) for name in tool_parsers.__all__)


@pytest.mark.parametrize("writer", [w for w in WRITERS if w.parser not in ("trinity",)], ids=lambda w: w.parser)
def test_auto_reads_what_the_format_writes(writer: Writer) -> None:
    wanted = [("write_file", {"path": "a", "content": "b c"}), ("write_file", {"path": "d"})]
    result = get_parser("auto").parse(writer.write(wanted), TOOLS)
    assert [(call.name, call.arguments) for call in result.good_calls] == wanted


def test_auto_agrees_with_the_named_parser_on_the_corpus() -> None:
    relevant = [r for r in records() if r["expected_tool_calls"] and r["id"] not in refused()]
    wrong = [
        r["id"]
        for r in relevant
        if complaints({**r, "parser": "auto", "asserted": {**r["asserted"], "content": "none", "reasoning": False}})
    ]
    assert len(wrong) / len(relevant) < 0.05, wrong


TEXTS = st.text() | st.lists(
    st.sampled_from([marker for writer in WRITERS for marker in (*writer.markers, writer.broken)] + ["{", "}", '"', "\n", "a", "\ud800"]),
    max_size=12,
).map("".join)  # fmt: skip


@settings(max_examples=400)
@given(TEXTS, st.sampled_from(list_parsers()), st.sampled_from(["content", "reasoning", "header", None]), st.booleans())
def test_no_text_makes_any_parser_raise_or_lose_its_place(
    text: str, name: str, start: str | None, strict: bool
) -> None:
    result = get_parser(name, strict=strict).parse(text, TOOLS, start)  # type: ignore[arg-type]
    for call in result.calls:
        assert 0 <= call.span[0] <= call.span[1] <= len(text)
        assert (call.error is None) or call.arguments == {}
        assert len(call.raw) == call.span[1] - call.span[0]
    starts = [call.span[0] for call in result.calls]
    assert starts == sorted(starts)
