"""Reads V4A patches: `*** Begin Patch`, file sections with hunks, `*** End Patch`. Reading touches no file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from agent_loop.tools.files.matching import find_blocks, nearest_lines, reindent
from agent_loop.tools.tool import ToolFailure

MAX_LINES_SEARCHED = 5_000_000
"""Hunks times lines of one file: each hunk is looked for in the whole file."""


def paths_of(changes: Iterable[FileChange]) -> list[str]:
    """Every path the patch reads or writes, once each."""
    paths: dict[str, None] = {}
    for change in changes:
        paths[change.path] = None
        if change.move_to:
            paths[change.move_to] = None
    return list(paths)


def apply_changes(changes: Iterable[FileChange], files: dict[str, str | None]) -> dict[str, str | None]:
    """New texts by path (None: the file is gone). `files` has the old texts, None where there is no file."""
    state = dict(files)
    for change in changes:
        _apply(change, state)
    return {path: text for path, text in state.items() if text != files.get(path)}


def _apply(change: FileChange, state: dict[str, str | None]) -> None:
    path, before = change.path, state[change.path]
    if change.kind == "add":
        if before is not None:
            raise ToolFailure(f"{path}: cannot add the file, it exists already. Use '*** Update File:'.")
        state[path] = "".join(f"{line}\n" for line in change.added)
        return
    if before is None:
        raise ToolFailure(f"{path}: cannot {change.kind} the file, it does not exist.")
    if change.kind == "delete":
        state[path] = None
        return
    after = _apply_hunks(before, change)
    if change.move_to and change.move_to != path:
        if state[change.move_to] is not None:
            raise ToolFailure(f"{path}: cannot move it to {change.move_to}, which exists already.")
        state[path], state[change.move_to] = None, after
    else:
        state[path] = after


def _apply_hunks(text: str, change: FileChange) -> str:
    """The text after all hunks, each looked for below the one before it."""
    hunks, path = change.hunks, change.path
    ends_with_newline = text.endswith("\n") or not text
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    if len(hunks) * len(lines) > MAX_LINES_SEARCHED:
        raise ToolFailure(f"{path}: {len(hunks)} hunks are too many for a file of {len(lines):,} lines. Send fewer.")
    at = 0
    for hunk in hunks:
        start, found, way = _locate(lines, hunk, at, path)
        if way != "exact":
            change.notes.append(f"the hunk at patch line {hunk.line} was found by ignoring differences in {way}")
        fresh = reindent(hunk.new, hunk.old, found) if hunk.old else hunk.new
        fresh = _keep_context(fresh, hunk, found)
        lines[start : start + len(hunk.old)] = fresh
        at = start + len(fresh)
    return "\n".join(lines) + ("\n" if ends_with_newline and lines else "")


def _locate(lines: list[str], hunk: Hunk, first: int, path: str) -> tuple[int, list[str], str]:
    after_hints = _after_hints(lines, hunk, first, path)
    if not hunk.old:
        at = len(lines) if hunk.at_end or not hunk.hints else after_hints
        return at, [], "exact"
    matches = find_blocks(lines, hunk.old, after_hints)
    if not matches.starts and after_hints != first:
        # The hint may itself be among the hunk's context lines.
        matches = find_blocks(lines, hunk.old, first)
    start = _choose(matches.starts, hunk, first, path, lines)
    return start, lines[start : start + len(hunk.old)], matches.way


def _choose(starts: tuple[int, ...], hunk: Hunk, first: int, path: str, lines: list[str]) -> int:
    """The place that is meant, of all that fit."""
    if not starts:
        near = nearest_lines(lines, hunk.old)
        hint = f" The nearest lines are:\n{near}" if near else ""
        raise ToolFailure(f"{path}: the hunk at patch line {hunk.line} does not match the file.{hint}")
    if hunk.at_end:
        return starts[-1]
    if len(starts) > 1 and not hunk.hints and first == 0:
        shown = ", ".join(str(start + 1) for start in starts[:20])
        raise ToolFailure(
            f"{path}: the hunk at patch line {hunk.line} matches {len(starts)} places (lines {shown}). "
            "Add more context lines, or a line above the change after '@@'."
        )
    return starts[0]


def _after_hints(lines: list[str], hunk: Hunk, first: int, path: str) -> int:
    at = first
    for hint in hunk.hints:
        found = next((n for n in range(at, len(lines)) if lines[n].strip() == hint.strip()), None)
        if found is None:
            found = next((n for n in range(at, len(lines)) if hint.strip() in lines[n]), None)
        if found is None and not hunk.old:
            raise ToolFailure(f"{path}: the line {hint!r} (patch line {hunk.line}) is not in the file.")
        at = found + 1 if found is not None else at
    return at


def _keep_context(fresh: list[str], hunk: Hunk, found: list[str]) -> list[str]:
    """Context lines stay as the file has them, also where the patch wrote them a little differently."""
    if hunk.old == found:
        return fresh
    head = 0
    while head < min(len(hunk.old), len(hunk.new)) and hunk.old[head] == hunk.new[head]:
        head += 1
    tail = 0
    while tail < min(len(hunk.old), len(hunk.new)) - head and hunk.old[-1 - tail] == hunk.new[-1 - tail]:
        tail += 1
    return [*found[:head], *fresh[head : len(fresh) - tail], *found[len(found) - tail :]]


Kind = Literal["update", "add", "delete"]
_SECTION = re.compile(r"\*\*\*\s*(Update|Add|Delete|Move) File:\s*(.*)")
_MOVE = re.compile(r"\*\*\*\s*Move to:\s*(.*)")
_END_OF_FILE = re.compile(r"\s*\*\*\*\s*End of File\s*")
_BEGIN_PATCH = re.compile(r"\s*\*\*\*\s*Begin Patch\s*")
_END_PATCH = re.compile(r"\s*\*\*\*\s*End Patch\s*")


@dataclass
class Hunk:
    """One change: the lines it expects (context and removed) and the lines it leaves (context and added)."""

    hints: list[str] = field(default_factory=list)
    """Lines after `@@`, to be found above the change, outermost first."""
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    at_end: bool = False
    line: int = 0
    """Line of the patch where it begins, for messages."""

    @property
    def empty(self) -> bool:
        """Whether the hunk says nothing."""
        return not self.old and not self.new


@dataclass
class FileChange:
    """All that a patch does to one path."""

    kind: Kind
    path: str
    move_to: str | None = None
    hunks: list[Hunk] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    line: int = 0
    notes: list[str] = field(default_factory=list)
    """What had to be tolerated: in reading the patch, and in finding its lines in the file."""


def parse_patch(text: str) -> list[FileChange]:
    """The file sections in order. Raises ToolFailure naming the line that is wrong."""
    reader = _Reader()
    lines = text.replace("\r\n", "\n").split("\n")
    first, last, markers = _extent(lines)
    for at in range(first, last):
        if at not in markers:
            reader.feed(at + 1, lines[at])
    return reader.finish()


def _extent(lines: list[str]) -> tuple[int, int, set[int]]:
    """Where the patch begins and ends, and which lines only say so. A marker after a blank is a line of the file,
    unless nothing comes before or after it."""
    marks = [at for at, line in enumerate(lines) if _BEGIN_PATCH.fullmatch(line) or _END_PATCH.fullmatch(line)]
    section = next((at for at, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    filled = [at for at, line in enumerate(lines) if line.strip()]
    begins = [at for at in marks if at < section]
    ends = [at for at in marks if _END_PATCH.fullmatch(lines[at]) and (lines[at][0] == "*" or at == filled[-1])]
    first, last = begins[0] + 1 if begins else 0, ends[-1] if ends else len(lines)
    return first, last, {at for at in marks if lines[at][0] == "*"}


class _Reader:
    """Line by line state: the open section and its open hunk."""

    def __init__(self) -> None:
        self._changes: list[FileChange] = []

    def feed(self, number: int, line: str) -> None:
        if (section := _section(number, line)) is not None:
            self._changes.append(section)
        elif not self._changes:
            if line.strip():
                raise ToolFailure(
                    f"Patch line {number}: expected '*** Update File: PATH' (or Add, Delete, Move), got {line!r}."
                )
        else:
            self._feed_section(self._changes[-1], number, line)

    def _feed_section(self, change: FileChange, number: int, line: str) -> None:
        if change.kind == "add":
            _feed_added(change, number, line)
        elif change.kind == "delete":
            if line.strip():
                raise ToolFailure(f"Patch line {number}: a Delete File section has no lines, got {line!r}.")
        elif move := _MOVE.match(line):
            change.move_to = move.group(1).strip() or None
        else:
            _feed_update(change, number, line)

    def finish(self) -> list[FileChange]:
        if not self._changes:
            raise ToolFailure(
                "The patch has no file sections: start with '*** Begin Patch' and '*** Update File: PATH'."
            )
        for change in self._changes:
            change.hunks = [hunk for hunk in (_without_trailing_blank(h) for h in change.hunks) if not hunk.empty]
            if change.kind == "update" and not change.hunks and not change.move_to:
                raise ToolFailure(f"Patch line {change.line}: the section for {change.path} changes nothing.")
        return self._changes


def _section(number: int, line: str) -> FileChange | None:
    found = _SECTION.match(line)
    if found is None:
        return None
    kind, path = found.group(1), found.group(2).strip()
    if not path:
        raise ToolFailure(f"Patch line {number}: a path is missing after '{line.strip()}'.")
    if kind != "Move":
        return FileChange(_KINDS[kind], path, line=number)
    source, arrow, target = (part.strip() for part in path.partition(" -> "))
    if not (source and arrow and target):
        raise ToolFailure(f"Patch line {number}: write '*** Move File: OLD -> NEW', got {line!r}.")
    return FileChange("update", source, move_to=target, line=number)


_KINDS: dict[str, Kind] = {"Update": "update", "Add": "add", "Delete": "delete"}


def _feed_added(change: FileChange, number: int, line: str) -> None:
    if line.startswith("+"):
        change.added.append(line[1:])
    elif line.strip() and not _END_OF_FILE.fullmatch(line):
        raise ToolFailure(f"Patch line {number}: every line of an added file begins with '+', got {line!r}.")


def _feed_update(change: FileChange, number: int, line: str) -> None:
    if line.startswith("@@"):
        _open_hunk(change, number, line[2:].strip().removesuffix("@@").strip())
        return
    if not change.hunks:
        if not line.strip():
            return
        change.hunks.append(Hunk(line=number))
    hunk = change.hunks[-1]
    if _END_OF_FILE.fullmatch(line):
        hunk.at_end = True
    elif line.startswith("+"):
        hunk.new.append(line[1:])
    elif line.startswith("-"):
        hunk.old.append(line[1:])
    elif line.startswith(" ") or not line:
        # Models often drop the space of an empty context line.
        hunk.old.append(line[1:])
        hunk.new.append(line[1:])
    elif line.startswith("***"):
        raise ToolFailure(f"Patch line {number}: a line of a hunk begins with ' ', '+' or '-', got {line!r}.")
    else:
        change.notes.append(f"patch line {number} has no ' ', '+' or '-' before it: read as context")
        hunk.old.append(line)
        hunk.new.append(line)


def _open_hunk(change: FileChange, number: int, hint: str) -> None:
    if change.hunks and change.hunks[-1].empty:
        # `@@ class A` followed by `@@ def f`: two hints for one hunk.
        change.hunks[-1].hints.extend([hint] if hint else [])
        return
    change.hunks.append(Hunk(hints=[hint] if hint else [], line=number))


def _without_trailing_blank(hunk: Hunk) -> Hunk:
    """Blank lines between sections look like context; at the end of a hunk they mean nothing."""
    while hunk.old and hunk.new and hunk.old[-1] == "" and hunk.new[-1] == "":
        hunk.old.pop()
        hunk.new.pop()
    return hunk
