"""Replacing text: exact first, unique unless asked, tolerant of whitespace, helpful when nothing fits."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agent_loop.tools.files.matching import Replaced, find_blocks, nearest_lines, reindent, replace_text
from agent_loop.tools.tool import ToolFailure

CODE = "class A:\n    def f(self):\n        return 1\n\n    def g(self):\n        return 2\n"


def test_an_exact_unique_text_is_replaced():
    done = replace_text(CODE, "return 1", "return 10")
    assert (done.text, done.count, done.way) == (CODE.replace("return 1", "return 10"), 1, "exact")


def test_part_of_a_line_can_be_replaced():
    assert replace_text("a = foo(1)", "foo", "bar").text == "a = bar(1)"


def test_a_text_that_is_there_twice_is_refused_with_its_lines():
    with pytest.raises(ToolFailure, match=r"2 times or more \(lines 2, 5\).*replace_all"):
        replace_text(CODE, "(self):", "(self, x):")


def test_replace_all_replaces_every_one():
    done = replace_text(CODE, "(self):", "(self, x):", replace_all=True)
    assert done.count == 2
    assert done.text.count("(self, x):") == 2


def test_an_empty_new_text_deletes():
    assert replace_text("a\nb\nc\n", "b\n", "").text == "a\nc\n"


@pytest.mark.parametrize(("old", "new", "said"), [("", "x", "empty"), ("x", "x", "same")])
def test_pointless_calls_are_told_so(old, new, said):
    with pytest.raises(ToolFailure, match=said):
        replace_text("x", old, new)


def test_trailing_whitespace_is_forgiven_and_said():
    done = replace_text("a  \nb\t\nc\n", "a\nb", "A\nB")
    assert (done.text, done.way) == ("A\nB\nc\n", "trailing whitespace")


def test_other_indentation_is_forgiven_and_the_new_text_takes_that_of_the_file():
    done = replace_text(CODE, "def f(self):\n    return 1", "def f(self):\n    x = 1\n    return x")
    assert done.way == "indentation"
    assert "    def f(self):\n        x = 1\n        return x\n\n" in done.text


def test_too_much_indentation_is_taken_off():
    done = replace_text(
        "def f():\n    return 1\n", "        def f():\n            return 1", "        def f():\n            return 2"
    )
    assert done.text == "def f():\n    return 2\n"


def test_inner_whitespace_is_forgiven():
    assert replace_text("x  =   f( 1 )\n", "x = f( 1 )", "x = f(2)").text == "x = f(2)\n"


def test_typographic_quotes_are_forgiven():
    done = replace_text('say("hello")\n', "say(“hello”)", 'say("bye")')
    assert (done.text, done.way) == ('say("bye")\n', "punctuation")


def test_an_exact_match_wins_over_a_looser_one():
    text = "  a\na\n"
    with pytest.raises(ToolFailure, match="2 times"):
        replace_text(text, "a", "b")
    assert replace_text("  a b\nx\na  b\n", "a  b", "c").text == "  a b\nx\nc\n"


def test_a_loose_match_must_be_unique_too():
    with pytest.raises(ToolFailure, match=r"lines 1, 3"):
        replace_text("  foo\nx\n    foo\n", "foo ", "bar ")


def test_the_nearest_lines_are_shown_when_nothing_matches():
    with pytest.raises(ToolFailure) as caught:
        replace_text(CODE, "def g(self, y):\n        return y", "x")
    assert "5|    def g(self):" in caught.value.message


def test_nothing_alike_is_said_plainly():
    with pytest.raises(ToolFailure, match="Nothing in the file is like it"):
        replace_text("alpha\nbeta\n", "zzz 123 qqq", "x")


def test_blank_text_is_never_matched_loosely():
    with pytest.raises(ToolFailure, match="not found"):
        replace_text("a\n\nb", "\n\n\n", "x")


def test_nearest_lines_survives_odd_files():
    assert nearest_lines([], ["x"]) == ""
    assert nearest_lines(["x"] * 3, ["", " "]) == ""
    assert "1|" in nearest_lines(["word " * 1000], ["word " * 999])


@given(st.lists(st.text(alphabet="ab \t", max_size=6), max_size=12), st.data())
def test_a_block_taken_from_the_file_is_found_where_it_was(lines, data):
    assume(lines)
    start = data.draw(st.integers(0, len(lines) - 1))
    stop = data.draw(st.integers(start + 1, len(lines)))
    block = lines[start:stop]
    assume(any(line.strip() for line in block))
    found = find_blocks(lines, block)
    assert found.way == "exact"
    assert all(lines[at : at + len(block)] == block for at in found.starts)


@given(
    st.text(alphabet="abc \n", max_size=30),
    st.text(alphabet="op", min_size=1, max_size=8),
    st.text(alphabet="abc \n", max_size=30),
    st.text(alphabet="xyz\n", max_size=8),
)
def test_a_unique_text_is_replaced_exactly_and_nothing_else_changes(before, old, after, new):
    assert replace_text(before + old + after, old, new).text == before + new + after


def test_reindenting_keeps_blank_lines_blank():
    assert reindent(["a", "", "  b"], ["a"], ["    a"]) == ["    a", "", "      b"]


def test_reindenting_from_spaces_to_tabs():
    assert reindent(["  a", "  b"], ["  a"], ["\ta"]) == ["\ta", "\tb"]


def test_equal_lines_are_no_trap():
    """A block that almost matches everywhere must cost the sum of the lengths, not their product: that took hours."""
    with pytest.raises(ToolFailure):
        replace_text("a\n" * 150_000, "a\n" * 75_000 + "b\n", "c")


@given(
    keys=st.lists(st.sampled_from("ab"), max_size=30), wanted=st.lists(st.sampled_from("ab"), min_size=1, max_size=5)
)
def test_blocks_are_found_where_a_plain_search_finds_them(keys, wanted):
    plain, at = [], 0
    while at + len(wanted) <= len(keys):
        if keys[at : at + len(wanted)] == wanted:
            plain.append(at)
            at += len(wanted)
        else:
            at += 1
    assert list(find_blocks(keys, wanted).starts) == plain


@pytest.mark.parametrize(
    ("text", "old", "way"),
    [
        ("x = f( a,   b ) + 1\n", "f( a, b )", "whitespace inside a line"),
        ("print(\u201chi\u201d, end)\n", 'print("hi"', "punctuation inside a line"),
        ("we wait \u2014 and see, then go\n", "wait -- and see", "dashes inside a line"),
        ("we wait \u2013 and see, then go\n", "wait - and see", "punctuation inside a line"),
        ("a\u00a0 b c d\n", "a b c", "punctuation inside a line"),
        ("first(a,  b,\nsecond) end\n", "(a, b,\nsecond)", "whitespace inside a line"),
    ],
)
def test_a_piece_inside_a_line_is_found_with_blanks_and_typography_tolerated(text, old, way):
    done = replace_text(text, old, "NEW")
    assert (done.count, done.way) == (1, way)
    head, tail = done.text.split("NEW")
    assert text.startswith(head)
    assert text.endswith(tail)
    assert done.text.count("\n") == text.count("\n") - old.count("\n")


def test_an_em_dash_is_two_hyphens_only_where_one_does_not_fit():
    assert replace_text("a \u2014 b\n", "a - b", "c").way == "punctuation"
    assert replace_text("a \u2014 b\n", "a -- b", "c").way == "dashes"


def test_a_piece_that_fits_twice_inside_lines_is_refused_unless_all_are_meant():
    text = "f(a,  b); f(a,   b)\n"
    with pytest.raises(ToolFailure, match="2 times"):
        replace_text(text, "f(a, b)", "g")
    assert replace_text(text, "f(a, b)", "g", replace_all=True).text == "g; g\n"


@given(
    text=st.text(alphabet="a \t\n\u2014\u201c\u00a0-", max_size=30),
    old=st.text(alphabet='a \n-"', min_size=1, max_size=6),
)
def test_what_is_outside_of_the_match_is_never_touched(text, old):
    try:
        done = replace_text(text, old, "N")
    except ToolFailure:
        return
    assert done.count == 1
    head, _, tail = done.text.partition("N")
    assert text.startswith(head)
    assert text.endswith(tail)


@pytest.mark.parametrize(
    ("text", "old", "new", "after"),
    [
        ("Wait\u2026and done", "Wait...and done", "Wait...then done", "Wait\u2026then done"),
        ("x = a \u2212 1\n", "x = a - 1", "x = b - 1", "x = b \u2212 1\n"),
        ("say \u201chi\u201d \u2014 now", '"hi" -- now', '"hi" -- later', "say \u201chi\u201d \u2014 later"),
        (
            "One \u2014 a\nTwo \u201cb\u201d\n",
            'One -- a\nTwo "b"',
            'One -- a\nTwo "c"',
            "One \u2014 a\nTwo \u201cc\u201d\n",
        ),
        ("a\u202fb\u2009c d", "a b c", "a b x", "a\u202fb\u2009x d"),
    ],
)
def test_what_is_not_changed_keeps_the_typography_of_the_file(text, old, new, after):
    assert replace_text(text, old, new).text == after


def test_newlines_and_tabs_written_as_two_characters_are_found_and_that_is_said():
    assert replace_text("a\n\tb\nc\n", "a\\n\\tb", "x\\n\\ty") == Replaced("x\n\ty\nc\n", 1, "escapes")


def test_escapes_that_the_file_has_stay_escapes():
    assert replace_text('sep = "\\t"\n', 'sep = "\\t"', 'sep = "\\tab"').text == 'sep = "\\tab"\n'
