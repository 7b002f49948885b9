"""Works out what a V4A patch makes of each file, over a picture of the files in memory. Nothing is written here."""

from __future__ import annotations

from collections.abc import Iterable

from agent_loop.tools.errors import ToolFailure
from agent_loop.tools.line_match import find_blocks, nearest_lines, reindent
from agent_loop.tools.v4a import FileChange, Hunk


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
    after = apply_hunks(before, change.hunks, path)
    if change.move_to and change.move_to != path:
        if state[change.move_to] is not None:
            raise ToolFailure(f"{path}: cannot move it to {change.move_to}, which exists already.")
        state[path], state[change.move_to] = None, after
    else:
        state[path] = after


def apply_hunks(text: str, hunks: Iterable[Hunk], path: str) -> str:
    """The text after all hunks, each looked for below the one before it."""
    ends_with_newline = text.endswith("\n") or not text
    lines = text.split("\n")
    if lines[-1] == "":
        lines.pop()
    at = 0
    for hunk in hunks:
        start, found = _locate(lines, hunk, at, path)
        fresh = reindent(hunk.new, hunk.old, found) if hunk.old else hunk.new
        fresh = _keep_context(fresh, hunk, found)
        lines[start : start + len(hunk.old)] = fresh
        at = start + len(fresh)
    return "\n".join(lines) + ("\n" if ends_with_newline and lines else "")


def _locate(lines: list[str], hunk: Hunk, first: int, path: str) -> tuple[int, list[str]]:
    after_hints = _after_hints(lines, hunk, first, path)
    if not hunk.old:
        at = len(lines) if hunk.at_end or not hunk.hints else after_hints
        return at, []
    matches = find_blocks(lines, hunk.old, after_hints)
    if not matches.starts and after_hints != first:
        # The hint may itself be among the hunk's context lines.
        matches = find_blocks(lines, hunk.old, first)
    start = _choose(matches.starts, hunk, first, path, lines)
    return start, lines[start : start + len(hunk.old)]


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
