"""The ways models break their own formats, tried on every format."""

from __future__ import annotations

import pytest

from support.parsers_writers import TOOLS, WRITERS, Writer
from tool_parsers import Parsed, get_parser, list_parsers

ARGUMENTS = {
    "path": "src/a b.py",
    "content": "def f():\n    return 'x' + \"y\" \\ 2\n",
    "count": -3,
    "ratio": 2.5,
    "flag": True,
    "tags": ["red", "blü"],
    "options": {"deep": {"list": [1, 2, {"a": "b"}]}, "on": False},
}
ids = [f"{writer.parser}-{index}" for index, writer in enumerate(WRITERS)]
every_format = pytest.mark.parametrize("writer", WRITERS, ids=ids)
formats_that_think = pytest.mark.parametrize("writer", [w for w in WRITERS if w.think], ids=lambda w: w.parser)
formats_with_broken_calls = pytest.mark.parametrize("writer", [w for w in WRITERS if w.broken], ids=lambda w: w.parser)


def parsed(writer: Writer, text: str) -> Parsed:
    return get_parser(writer.parser).parse(text, TOOLS)


def calls(result: Parsed) -> list[tuple[str, dict[str, object]]]:
    return [(call.name, call.arguments) for call in result.good_calls]


def text_of(result: Parsed) -> str:
    return result.content + result.trailing


def test_every_format_has_a_writer() -> None:
    covered = {get_parser(writer.parser).name for writer in WRITERS}
    without_calls = {"auto", "plain", "kimi_vl"}
    same_markers = {"apriel16"}
    assert set(list_parsers()) - covered - without_calls == same_markers


@every_format
def test_a_call_is_read_with_all_its_types(writer: Writer) -> None:
    result = parsed(writer, writer.write([("write_file", ARGUMENTS)]))
    assert calls(result) == [("write_file", ARGUMENTS)]
    assert result.calls[0].complete
    assert result.calls[0].declared
    assert result.calls[0].repaired == ()
    assert not result.errors


@every_format
def test_several_calls_come_in_order(writer: Writer) -> None:
    wanted = [("write_file", {"path": "a"}), ("now", {}), ("write_file", {"path": "b", "count": 7})]
    assert calls(parsed(writer, writer.write(wanted))) == wanted


@every_format
def test_markers_inside_values_are_data(writer: Writer) -> None:
    for marker in writer.markers:
        for value in (f"a {marker} b", marker, f"{marker} b", f"line\n{marker}\nline"):
            wanted = [("write_file", {"content": value, "path": "p"}), ("write_file", {"path": "second"})]
            assert calls(parsed(writer, writer.write(wanted))) == wanted, value


@every_format
def test_a_value_may_quote_a_whole_call_of_its_own_format(writer: Writer) -> None:
    if writer.parser in ("muse", "muse_glimmer", "beam", "minimax_m3", "gemma4", "functiongemma"):
        pytest.skip("the format has no escape for its own message and string markers")
    quoted = writer.write([("write_file", {"path": "inner"})])
    wanted = [
        ("write_file", {"content": f"Example:\n{quoted}\nDone.", "path": "p"}),
        ("write_file", {"path": "second"}),
    ]
    assert calls(parsed(writer, writer.write(wanted))) == wanted


@every_format
def test_unicode_and_control_characters_survive(writer: Writer) -> None:
    value = "日本 🎉 é ​ tab\tend"
    assert calls(parsed(writer, writer.write([("write_file", {"content": value})]))) == [
        ("write_file", {"content": value})
    ]


@every_format
def test_values_that_look_like_other_types_stay_strings(writer: Writer) -> None:
    for value in ("007", "123_456", "null", "true", "1e5", "", "  padded  ", '{"a": 1}', "[1]", '"quoted"'):
        wanted = [("write_file", {"content": value, "path": "p"})]
        assert calls(parsed(writer, writer.write(wanted))) == wanted, value


@every_format
def test_text_before_and_after_is_kept_apart_from_the_calls(writer: Writer) -> None:
    body = writer.write([("write_file", {"path": "a"})])
    if writer.parser in ("functionary_v32", "harmony", "beam", "muse", "muse_glimmer"):
        pytest.skip("text outside messages has no place in this format")
    result = parsed(writer, f"Before.\n{body}\nAfter.")
    assert calls(result) == [("write_file", {"path": "a"})]
    if writer.joined:
        assert result.content.split() == ["Before.", "After."]
    else:
        assert (result.content.strip(), result.trailing.strip()) == ("Before.", "After.")


@every_format
def test_plain_text_has_no_calls_and_no_errors(writer: Writer) -> None:
    text = "Nothing to call here: 1 < 2, a[0] = {x}, f(x) and <b>bold</b>.\n"
    result = parsed(writer, text)
    assert (result.content, result.calls, result.errors) == (text, (), ())


@formats_with_broken_calls
def test_a_broken_call_costs_no_neighbour_and_is_told_apart(writer: Writer) -> None:
    first, second = [("write_file", {"path": "a"})], [("write_file", {"path": "b"})]
    result = parsed(
        writer, writer.write(first) + writer.separator + writer.broken + writer.separator + writer.write(second)
    )
    assert calls(result) == first + second
    faults = [call for call in result.calls if not call.ok]
    assert faults or result.errors
    assert all(call.arguments == {} and call.error for call in faults)


@formats_with_broken_calls
def test_a_turn_with_only_a_broken_call_keeps_its_text(writer: Writer) -> None:
    result = parsed(writer, writer.broken)
    assert not result.good_calls
    assert result.errors or result.calls


@every_format
def test_a_text_cut_anywhere_never_invents_arguments(writer: Writer) -> None:
    wanted = [
        ("write_file", {"path": "abc", "content": "hello world", "tags": ["x", "y"]}),
        ("write_file", {"path": "z"}),
    ]
    whole = writer.write(wanted)
    for cut in range(0, len(whole), 2):
        for call in parsed(writer, whole[:cut]).good_calls:
            complete = (call.name, call.arguments) in wanted
            # Text formats cannot know whether another parameter would have come: then the call says it is not complete.
            partial = not call.complete and call.arguments.items() <= dict(wanted[0][1]).items()
            assert complete or partial, (whole[:cut], call)


@formats_that_think
def test_drafts_inside_thinking_are_not_calls(writer: Writer) -> None:
    assert writer.think
    opener, closer = writer.think
    if writer.parser in ("harmony", "beam", "muse", "muse_glimmer", "inkling", "solar_open"):
        draft = "maybe call write_file with a path"
    else:
        draft = "maybe " + writer.write([("write_file", {"path": "draft"})]) + " or not"
    real = [("write_file", {"path": "real"})]
    result = parsed(writer, f"{opener}{draft}{closer}{writer.write(real)}")
    assert calls(result) == real
    assert "maybe" in result.reasoning
    assert "maybe" not in text_of(result)


@formats_that_think
def test_thinking_opened_by_the_prompt_is_split_off(writer: Writer) -> None:
    assert writer.think
    if writer.parser in ("harmony", "beam", "muse", "muse_glimmer", "inkling", "solar_open"):
        pytest.skip("messages of this format carry their own header")
    real = [("write_file", {"path": "real"})]
    text = f"so I will{writer.think[1]}\nDone.\n{writer.write(real)}"
    for start in ("reasoning", None, "content"):
        result = get_parser(writer.parser).parse(text, TOOLS, start)
        assert calls(result) == real
        assert result.reasoning == "so I will"
        assert text_of(result).strip() == "Done."


@formats_that_think
def test_an_unclosed_thought_that_ends_in_a_call_gives_the_call(writer: Writer) -> None:
    assert writer.think
    if writer.parser in ("harmony", "beam", "muse", "muse_glimmer", "inkling", "solar_open"):
        pytest.skip("messages of this format carry their own header")
    real = [("write_file", {"path": "real"})]
    result = parsed(writer, f"{writer.think[0]}I will\n{writer.write(real)}")
    assert calls(result) == real
    assert result.reasoning.strip() == "I will"


@every_format
def test_an_undeclared_name_is_forwarded_with_a_flag(writer: Writer) -> None:
    result = parsed(writer, writer.write([("unknown_tool", {"path": "a"})]))
    assert [call.name for call in result.good_calls] == ["unknown_tool"]
    assert result.calls[0].declared is False
    assert get_parser(writer.parser).parse(writer.write([("now", {})])).calls[0].declared is None


@every_format
def test_spans_point_at_the_call(writer: Writer) -> None:
    text = writer.write([("write_file", {"path": "one"}), ("write_file", {"path": "two"})])
    result = parsed(writer, text)
    assert all(text[call.span[0] : call.span[1]] == call.raw for call in result.calls)
    assert ["one" in call.raw and "two" not in call.raw for call in result.calls] == [True, False]
