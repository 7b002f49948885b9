"""Replace a piece of text in a file: exact first, then line by line with small differences tolerated."""

from __future__ import annotations

from dataclasses import dataclass

from agent_loop.tools.errors import ToolFailure
from agent_loop.tools.line_match import LineMatches, find_blocks, nearest_lines, reindent


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
    if not found.starts:
        near = nearest_lines(lines, old_lines)
        hint = f" The nearest lines are:\n{near}" if near else " Nothing in the file is like it."
        raise ToolFailure(f"old_string was not found in the file.{hint}\nRead the file and copy the text exactly.")
    if len(found.starts) > 1 and not replace_all:
        raise _ambiguous([start + 1 for start in found.starts])
    return Replaced(_spliced(lines, found, old_lines, new), len(found.starts), found.way)


def _spliced(lines: list[str], found: LineMatches, old_lines: list[str], new: str) -> str:
    result, size = list(lines), len(old_lines)
    for start in reversed(found.starts):
        there = lines[start : start + size]
        result[start : start + size] = reindent(_block(new), old_lines, there) if new else []
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
