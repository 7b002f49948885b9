"""Reads V4A patches: `*** Begin Patch`, file sections with hunks, `*** End Patch`. Reading touches no file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from agent_loop.tools.errors import ToolFailure

Kind = Literal["update", "add", "delete"]
_SECTIONS: dict[str, Kind] = {"*** Update File:": "update", "*** Add File:": "add", "*** Delete File:": "delete"}
_MOVE = "*** Move to:"
_END_OF_FILE = "*** End of File"


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


def parse_patch(text: str) -> list[FileChange]:
    """The file sections in order. Raises ToolFailure naming the line that is wrong."""
    reader = _Reader()
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if line.strip() == "*** End Patch":
            break
        reader.feed(number, line)
    return reader.finish()


class _Reader:
    """Line by line state: the open section and its open hunk."""

    def __init__(self) -> None:
        self._changes: list[FileChange] = []

    def feed(self, number: int, line: str) -> None:
        if line.strip() == "*** Begin Patch":
            return
        if (section := _section(line)) is not None:
            kind, path = section
            if not path:
                raise ToolFailure(f"Patch line {number}: a path is missing after '{line.strip()}'.")
            self._changes.append(FileChange(kind, path, line=number))
        elif not self._changes:
            if line.strip():
                raise ToolFailure(
                    f"Patch line {number}: expected '*** Update File: PATH' (or Add, Delete), got {line!r}."
                )
        else:
            self._feed_section(self._changes[-1], number, line)

    def _feed_section(self, change: FileChange, number: int, line: str) -> None:
        if change.kind == "add":
            _feed_added(change, number, line)
        elif change.kind == "delete":
            if line.strip():
                raise ToolFailure(f"Patch line {number}: a Delete File section has no lines, got {line!r}.")
        elif line.startswith(_MOVE):
            change.move_to = line[len(_MOVE) :].strip() or None
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


def _section(line: str) -> tuple[Kind, str] | None:
    for prefix, kind in _SECTIONS.items():
        if line.startswith(prefix):
            return kind, line[len(prefix) :].strip()
    return None


def _feed_added(change: FileChange, number: int, line: str) -> None:
    if line.startswith("+"):
        change.added.append(line[1:])
    elif line.strip() and line.strip() != _END_OF_FILE:
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
    if line.strip() == _END_OF_FILE:
        hunk.at_end = True
    elif line.startswith("+"):
        hunk.new.append(line[1:])
    elif line.startswith("-"):
        hunk.old.append(line[1:])
    elif line.startswith(" ") or not line:
        # Models often drop the space of an empty context line.
        hunk.old.append(line[1:])
        hunk.new.append(line[1:])
    else:
        raise ToolFailure(f"Patch line {number}: a line of a hunk begins with ' ', '+' or '-', got {line!r}.")


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
