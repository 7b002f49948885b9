"""Text as it is on disk: what is binary, which newlines a file uses, and a decoding that loses no byte."""

from __future__ import annotations

from dataclasses import dataclass

BINARY_SAMPLE_BYTES = 8192
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_BINARY_MARKS = (b"\x89PNG", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"%PDF-", b"PK\x03\x04", b"\x1f\x8b", b"\x7fELF")
"""How pictures, documents, archives and programs begin: short ones may be without a NUL byte."""


def binary_reason(data: bytes) -> str | None:
    """Why these bytes are not text, or None when they are."""
    sample = data[:BINARY_SAMPLE_BYTES]
    if sample.startswith(_UTF16_MARKS):
        return "UTF-16 text (convert it with: iconv -f UTF-16 -t UTF-8)"
    return "a binary file" if b"\0" in sample or sample.startswith(_BINARY_MARKS) else None


def decode(data: bytes) -> str:
    """Bytes to text for editing: bytes that are not UTF-8 come back unchanged from `encode`."""
    return data.decode("utf-8", "surrogateescape")


def encode(text: str) -> bytes:
    """The inverse of `decode`. Raises UnicodeEncodeError for surrogates that no bytes stand for."""
    return text.encode("utf-8", "surrogateescape")


def decode_for_reading(data: bytes) -> tuple[str, int]:
    """Text for the model, and how many bytes of it are not UTF-8 (each shown as U+FFFD)."""
    try:
        return data.decode("utf-8"), 0
    except UnicodeDecodeError:
        text = decode(data)
        bad = sum("\udc80" <= char <= "\udcff" for char in text)
        return "".join("\ufffd" if "\udc80" <= char <= "\udcff" else char for char in text), bad


def split_lines(text: str) -> list[str]:
    """Lines as every tool here counts them: split at LF only, a final LF ends the last line. CR stays visible."""
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    return lines


def newline_style(text: str) -> str:
    """CRLF when every line of the text ends that way, else LF."""
    newlines = text.count("\n")
    return "\r\n" if newlines and text.count("\r\n") == newlines else "\n"


def with_newlines(text: str, style: str) -> str:
    """The text with each line ending in the given style; CRs that are not part of a newline stay."""
    unified = text.replace("\r\n", "\n")
    return unified.replace("\n", style) if style != "\n" else unified


@dataclass(frozen=True)
class EditableText:
    """A file opened for editing: its text with LF newlines, and what is needed to write it back alike."""

    text: str
    newline: str = "\n"
    mark: str = ""
    """A byte order mark at the start, kept apart so that line 1 can be matched."""

    @classmethod
    def from_bytes(cls, data: bytes) -> EditableText:
        """Open bytes. Files of mixed newlines keep every one of them, and are edited as they are."""
        text = decode(data)
        mark = "\ufeff" if text.startswith("\ufeff") else ""
        text = text[len(mark) :]
        style = newline_style(text)
        return cls(text.replace("\r\n", "\n") if style == "\r\n" else text, style, mark)

    def with_text(self, text: str) -> EditableText:
        """The same file with another text."""
        return EditableText(text.replace("\r\n", "\n") if self.newline == "\r\n" else text, self.newline, self.mark)

    def to_bytes(self) -> bytes:
        """The file as it goes to disk."""
        text = self.text.replace("\n", "\r\n") if self.newline == "\r\n" else self.text
        return encode(self.mark + text)
