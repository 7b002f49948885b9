"""No byte of a file is lost by editing it; lines are counted one way; binary is told from text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.tools.files.text_file import (
    EditableText,
    binary_reason,
    decode,
    decode_for_reading,
    encode,
    newline_style,
    split_lines,
    with_newlines,
)


@given(st.binary())
def test_decoding_and_encoding_gives_every_byte_back(data):
    assert encode(decode(data)) == data


@given(st.binary())
def test_opening_and_writing_back_changes_nothing(data):
    assert EditableText.from_bytes(data).to_bytes() == data


@given(st.text(alphabet="ab\n\r"))
def test_text_with_any_newlines_is_written_back_alike(text):
    assert EditableText.from_bytes(text.encode()).to_bytes() == text.encode()


def test_crlf_files_are_edited_with_lf_and_written_with_crlf():
    file = EditableText.from_bytes(b"a\r\nb\r\n")
    assert file.text == "a\nb\n"
    assert file.with_text("a\nX\r\nb\n").to_bytes() == b"a\r\nX\r\nb\r\n"


def test_a_byte_order_mark_is_kept():
    file = EditableText.from_bytes(b"\xef\xbb\xbfa\n")
    assert file.text == "a\n"
    assert file.with_text("b\n").to_bytes() == b"\xef\xbb\xbfb\n"


@pytest.mark.parametrize(
    ("text", "style"), [("a\r\nb\r\n", "\r\n"), ("a\nb\r\n", "\n"), ("a", "\n"), ("", "\n"), ("a\rb", "\n")]
)
def test_the_style_is_crlf_only_when_every_line_has_it(text, style):
    assert newline_style(text) == style


def test_newlines_are_converted_without_doubling():
    assert with_newlines("a\nb\r\nc", "\r\n") == "a\r\nb\r\nc"
    assert with_newlines("a\r\nb\n", "\n") == "a\nb\n"


@pytest.mark.parametrize(
    ("text", "lines"),
    [("", []), ("\n", [""]), ("a", ["a"]), ("a\n", ["a"]), ("a\nb", ["a", "b"]), ("a\r\n\n", ["a\r", ""])],
)
def test_lines_end_at_lf_only(text, lines):
    assert split_lines(text) == lines


def test_other_line_separators_are_ordinary_characters():
    assert split_lines("a\x0bb\x0cc\u2028d\x85e\n") == ["a\x0bb\x0cc\u2028d\x85e"]


@pytest.mark.parametrize(
    ("data", "kind"),
    [(b"text", None), (b"caf\xe9", None), (b"\x7fELF\0", "binary"), (b"\xff\xfea\0", "UTF-16"), (b"", None)],
)
def test_only_nul_bytes_make_a_file_binary(data, kind):
    reason = binary_reason(data)
    assert (reason is None) if kind is None else (kind in reason)


def test_bytes_that_are_not_utf8_are_shown_and_counted():
    assert decode_for_reading(b"caf\xe9 \xff ok") == ("caf\ufffd \ufffd ok", 2)
    assert decode_for_reading("é".encode()) == ("é", 0)
