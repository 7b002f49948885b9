"""Replace a piece of text in a file: exact first, then line by line with small differences tolerated."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from agent_loop.tools.tool import ToolFailure

_PUNCTUATION = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2026": "...",
        **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
        **dict.fromkeys("\u00a0\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B))), " "),
    }
)

MAX_TOLERANT_LINES = 200_000
"""In longer files only exact text is found."""

_DASHES = _PUNCTUATION | {ord("\u2014"): "--"}
"""Models write an em dash as two hyphens."""

LineKey = Callable[[str], str]

WAYS: tuple[tuple[str, LineKey], ...] = (
    ("exact", lambda line: line),
    ("trailing whitespace", str.rstrip),
    ("indentation", str.strip),
    ("whitespace", lambda line: re.sub(r"\s+", " ", line).strip()),
    ("punctuation", lambda line: re.sub(r"\s+", " ", line.translate(_PUNCTUATION)).strip()),
    ("dashes", lambda line: re.sub(r"\s+", " ", line.translate(_DASHES)).strip()),
)
WAYS_INSIDE: tuple[tuple[str, Mapping[int, str]], ...] = (
    ("whitespace inside a line", {}),
    ("punctuation inside a line", _PUNCTUATION),
    ("dashes inside a line", _DASHES),
)
"""For a piece that is not whole lines: what its characters, and those of the file, are read as."""
MAX_CHARS_INSIDE = 500_000


@dataclass(frozen=True)
class LineMatches:
    """Where a block was found: indexes of first lines, and how lines were compared."""

    starts: tuple[int, ...]
    way: str


def find_blocks(lines: Sequence[str], block: Sequence[str], first: int = 0) -> LineMatches:
    """All places of the block at or after line `first`, by the strictest way that finds any."""
    if not block or not any(line.strip() for line in block):
        return LineMatches((), "exact")
    ways = WAYS if len(lines) <= MAX_TOLERANT_LINES else WAYS[:1]
    for way, key in ways:
        wanted = [key(line) for line in block]
        if starts := _positions([key(line) for line in lines[first:]], wanted):
            return LineMatches(tuple(first + start for start in starts), way)
    return LineMatches((), "exact")


def _positions(keys: list[str], wanted: list[str]) -> list[int]:
    """First lines of non-overlapping occurrences. Linear (Knuth-Morris-Pratt): a file of equal lines is no trap."""
    borders, found, matched = _borders(wanted), [], 0
    for at, key in enumerate(keys):
        while matched and key != wanted[matched]:
            matched = borders[matched - 1]
        matched += key == wanted[matched]
        if matched == len(wanted):
            found.append(at + 1 - matched)
            matched = 0
    return found


def _borders(wanted: list[str]) -> list[int]:
    """For each beginning of the block, the length of its longest own beginning that is also its end."""
    borders, length = [0], 0
    for line in wanted[1:]:
        while length and line != wanted[length]:
            length = borders[length - 1]
        length += line == wanted[length]
        borders.append(length)
    return borders


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


@dataclass(frozen=True)
class Replaced:
    """The new text, how many places changed, and how the old text was found."""

    text: str
    count: int
    way: str = "exact"


def replace_text(text: str, old: str, new: str, replace_all: bool = False) -> Replaced:
    """Replace `old` by `new`. Raises ToolFailure, with the nearest lines, when it is not there or not unique."""
    if not old:
        raise ToolFailure("old_string is empty: give the text to replace, or use write_file for a whole file.")
    if old == new:
        raise ToolFailure("old_string and new_string are the same: nothing to change.")
    count = text.count(old)
    if count == 1 or (count and replace_all):
        return Replaced(text.replace(old, new), count)
    if count:
        raise _ambiguous(_line_numbers(text, old))
    return _replace_lines(text, old, new, replace_all)


def _replace_lines(text: str, old: str, new: str, replace_all: bool) -> Replaced:
    lines, old_lines = text.split("\n"), _block(old)
    found = find_blocks(lines, old_lines)
    if not found.starts and (inside := _replace_inside(text, old, new, replace_all)):
        return inside
    if not found.starts and (plain := _unescaped(old)) != old and plain in text:
        return replace(replace_text(text, plain, _unescaped(new), replace_all), way="escapes")
    if not found.starts:
        near = nearest_lines(lines, old_lines)
        hint = f" The nearest lines are:\n{near}" if near else " Nothing in the file is like it."
        raise ToolFailure(f"old_string was not found in the file.{hint}\nRead the file and copy the text exactly.")
    if len(found.starts) > 1 and not replace_all:
        raise _ambiguous([start + 1 for start in found.starts])
    return Replaced(_spliced(lines, found, old_lines, new), len(found.starts), found.way)


def _unescaped(text: str) -> str:
    """The text with newlines and tabs that were written as two characters."""
    return text.replace("\\r\\n", "\n").replace("\\n", "\n").replace("\\t", "\t")


def _replace_inside(text: str, old: str, new: str, replace_all: bool) -> Replaced | None:
    """Replace a piece of one or more lines, with blanks and typography tolerated; None when it is not there."""
    if len(text) > MAX_CHARS_INSIDE or not old.strip():
        return None
    for way, table in WAYS_INSIDE:
        spans = _spans_inside(text, old.strip(" \t"), table)
        if len(spans) > 1 and not replace_all:
            raise _ambiguous([text.count("\n", 0, start) + 1 for start, _ in spans[:20]])
        if spans:
            pieces, at = [], 0
            for start, end in spans:
                pieces += [text[at:start], _as_spelt(text[start:end], old.strip(" \t"), new.strip(" \t"), table)]
                at = end
            return Replaced("".join([*pieces, text[at:]]), len(spans), way)
    return None


def _spans_inside(text: str, old: str, table: Mapping[int, str]) -> list[tuple[int, int]]:
    key, places = _as_read(text, table)
    wanted, _ = _as_read(old, table)
    spans, at = [], key.find(wanted)
    while at >= 0:
        spans.append((places[at], places[at + len(wanted)]))
        at = key.find(wanted, at + len(wanted))
    return spans


def _as_read(text: str, table: Mapping[int, str]) -> tuple[str, list[int]]:
    """The text as it is compared (runs of blanks are one), and where in the text each of its characters stands."""
    pieces: list[str] = []
    places: list[int] = []
    for match in re.finditer(r"[ \t]+|[^ \t]", text):
        piece = " " if match.group()[0] in " \t" else table.get(ord(match.group()), match.group())
        if piece == " " and pieces and pieces[-1] == " ":  # a no-break space next to a blank
            continue
        pieces.append(piece)
        places += [match.start()] * len(piece)
    return "".join(pieces), [*places, len(text)]


def _as_spelt(there: str, old: str, new: str, table: Mapping[int, str]) -> str:
    """The new text, whose beginning and end that `old` has as well stay as the file spells them."""
    if not table:
        return new
    key, places = _as_read(there, table)
    old_key, old_places = _as_read(old, table)
    if key != old_key:
        return new
    head = _alike(old, new)
    tail = _alike(old[head:][::-1], new[head:][::-1])
    begin = bisect_right(old_places, head) - 1
    end = bisect_left(old_places, len(old) - tail)
    kept_head, kept_tail = old_places[begin], len(old) - old_places[end]
    # The character before may be one of several that the file has as one, as three dots are.
    while begin and places[begin] == places[begin - 1]:
        begin, kept_head = begin - 1, old_places[begin - 1]
    while end < len(key) and end and places[end] == places[end - 1]:
        end, kept_tail = end + 1, len(old) - old_places[end + 1]
    return there[: places[begin]] + new[kept_head : len(new) - kept_tail] + there[places[end] :]


def _alike(one: str, other: str) -> int:
    """With how many characters both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _spliced(lines: list[str], found: LineMatches, old_lines: list[str], new: str) -> str:
    result, size = list(lines), len(old_lines)
    table = {"punctuation": _PUNCTUATION, "dashes": _DASHES}.get(found.way, {})
    for start in reversed(found.starts):
        there = lines[start : start + size]
        spelt = _as_spelt("\n".join(there), "\n".join(old_lines), "\n".join(_block(new)), table)
        result[start : start + size] = reindent(spelt.split("\n"), old_lines, there) if new else []
    return "\n".join(result)


def _block(text: str) -> list[str]:
    """Whole lines of a piece of text; the newline that ends the piece belongs to its last line."""
    lines = text.replace("\r\n", "\n").split("\n")
    if len(lines) > 1 and lines[-1] == "":
        lines.pop()
    return lines


def _line_numbers(text: str, old: str) -> list[int]:
    numbers: list[int] = []
    at = text.find(old)
    while at >= 0 and len(numbers) < 20:
        numbers.append(text.count("\n", 0, at) + 1)
        at = text.find(old, at + len(old))
    return numbers


def _ambiguous(numbers: list[int]) -> ToolFailure:
    shown = ", ".join(map(str, numbers[:20]))
    return ToolFailure(
        f"old_string is in the file {len(numbers)} times or more (lines {shown}). "
        "Include more of the surrounding lines to make it unique, or set replace_all=true."
    )
