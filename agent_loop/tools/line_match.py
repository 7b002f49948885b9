"""Find a block of lines in a file although whitespace or punctuation differ a little; exact matches always win.

Each way of comparing is tried over the whole file before a looser one. A looser match is reported by name, so that
nobody mistakes it for an exact one.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_PUNCTUATION = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "-",
        "\u00a0": " ",
        "\u2026": "...",
    }
)

LineKey = Callable[[str], str]

WAYS: tuple[tuple[str, LineKey], ...] = (
    ("exact", lambda line: line),
    ("trailing whitespace", str.rstrip),
    ("indentation", str.strip),
    ("whitespace", lambda line: re.sub(r"\s+", " ", line).strip()),
    ("punctuation", lambda line: re.sub(r"\s+", " ", line.translate(_PUNCTUATION)).strip()),
)


@dataclass(frozen=True)
class LineMatches:
    """Where a block was found: indexes of first lines, and how lines were compared."""

    starts: tuple[int, ...]
    way: str


def find_blocks(lines: Sequence[str], block: Sequence[str], first: int = 0) -> LineMatches:
    """All places of the block at or after line `first`, by the strictest way that finds any."""
    if not block or not any(line.strip() for line in block):
        return LineMatches((), "exact")
    for way, key in WAYS:
        wanted = [key(line) for line in block]
        if starts := _positions([key(line) for line in lines[first:]], wanted):
            return LineMatches(tuple(first + start for start in starts), way)
    return LineMatches((), "exact")


def _positions(keys: list[str], wanted: list[str]) -> list[int]:
    """First lines of non-overlapping occurrences."""
    size, found, at = len(wanted), [], 0
    while at + size <= len(keys):
        if keys[at] == wanted[0] and keys[at : at + size] == wanted:
            found.append(at)
            at += size
        else:
            at += 1
    return found


def reindent(new: Sequence[str], old: Sequence[str], found: Sequence[str]) -> list[str]:
    """New lines moved by the difference between the indentation asked for and the one in the file."""
    pair = next(((a, b) for a, b in zip(old, found, strict=False) if a.strip()), None)
    if pair is None:
        return list(new)
    asked, there = _indent(pair[0]), _indent(pair[1])
    if asked == there:
        return list(new)
    if there.endswith(asked):
        extra = there[: len(there) - len(asked)]
        return [extra + line if line.strip() else line for line in new]
    if asked.endswith(there):
        surplus = asked[: len(asked) - len(there)]
        return [line[len(surplus) :] if line.startswith(surplus) else line for line in new]
    return [there + line[len(asked) :] if line.startswith(asked) and line.strip() else line for line in new]


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


MAX_LINES_COMPARED = 20_000
_CANDIDATES = 20


def nearest_lines(lines: Sequence[str], block: Sequence[str], context: int = 2) -> str:
    """The lines of the file most like the block, numbered, for an error message; empty when nothing is alike."""
    anchors = sorted({line.strip()[:300] for line in block if line.strip()}, key=len)[-2:]
    best_at, best = -1, 0.5
    for anchor in anchors:
        matcher = difflib.SequenceMatcher(a="", b=anchor, autojunk=False)
        for at in _sharing_words(lines[:MAX_LINES_COMPARED], anchor):
            matcher.set_seq1(lines[at].strip()[:300])
            if (alike := matcher.ratio()) > best:
                best_at, best = max(0, at - _index_in(block, anchor)), alike
    if best_at < 0:
        return ""
    start, stop = max(0, best_at - context), min(len(lines), best_at + len(block) + context)
    return "\n".join(f"{at + 1}|{lines[at][:300]}" for at in range(start, min(stop, start + 30)))


def _sharing_words(lines: Sequence[str], anchor: str) -> list[int]:
    """Lines with the most words of the anchor: a cheap first look before the careful comparison."""
    wanted = set(re.findall(r"\w+", anchor))
    if not wanted:
        return []
    scored = []
    for at, line in enumerate(lines):
        words = set(re.findall(r"\w+", line[:300]))
        if shared := len(wanted & words):
            scored.append((-shared / len(wanted | words), at))
    return [at for _, at in sorted(scored)[:_CANDIDATES]]


def _index_in(block: Sequence[str], anchor: str) -> int:
    return next(at for at, line in enumerate(block) if line.strip()[:300] == anchor)
