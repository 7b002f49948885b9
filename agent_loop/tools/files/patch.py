"""patch: a replacement in one file, or a V4A patch over several, all or nothing."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agent_loop.tools.files.matching import replace_text
from agent_loop.tools.files.syntax import lint
from agent_loop.tools.files.text_file import EditableText, binary_reason, split_lines
from agent_loop.tools.files.v4a import apply_changes, parse_patch, paths_of
from agent_loop.tools.files.workspace import Workspace
from agent_loop.tools.tool import CallContext, InvalidArguments, Tool, ToolFailure, load_schema, work_out

Files = Mapping[str, EditableText | None]
"""Texts by path; None where there is no file."""


@dataclass(frozen=True)
class _Step:
    path: str
    data: bytes | None
    before: bytes | None
    mode: int | None
    """Of the file before, where writing it again would not keep it."""


async def commit(workspace: Workspace, old: Files, new: Files, moves: Mapping[str, str]) -> None:
    """Bring the files from `old` to `new`; a moved file (`moves`: new path to old path) takes its mode along."""
    steps = await _plan(workspace, old, new, moves)
    done: list[_Step] = []
    try:
        for step in steps:
            await _put(workspace, step.path, step.data, step.mode)
            done.append(step)
    except (ToolFailure, asyncio.CancelledError) as reason:
        lost = await _put_back(workspace, done)
        if lost and isinstance(reason, ToolFailure):
            reason.message += f" What was changed before could not be put back in: {', '.join(lost)}."
        raise


async def _plan(workspace: Workspace, old: Files, new: Files, moves: Mapping[str, str]) -> list[_Step]:
    steps = []
    for path, file in new.items():
        before = old.get(path)
        source = path if file is None else moves.get(path)
        mode = await workspace.mode(source) if source else None
        try:
            data = file.to_bytes() if file else None
        except UnicodeEncodeError:
            raise InvalidArguments("The new text has a lone surrogate: it cannot be stored as UTF-8.") from None
        steps.append(_Step(path, data, before.to_bytes() if before else None, mode))
    # Removals last: until every write has worked, nothing is lost.
    return sorted(steps, key=lambda step: step.data is None)


async def _put(workspace: Workspace, path: str, data: bytes | None, mode: int | None) -> None:
    if data is None:
        await workspace.remove(path)
    else:
        await workspace.write(path, data, mode)


async def _put_back(workspace: Workspace, done: list[_Step]) -> list[str]:
    """Undo what was done; the paths where that failed."""
    lost = []
    for step in reversed(done):
        try:
            await _put(workspace, step.path, step.before, step.mode if step.data is None else None)
        except ToolFailure:
            lost.append(step.path)
    return lost


MAX_DIFF_CHARS = 20_000
MAX_LINES_COMPARED = 2_000
CONTEXT = 3
MAX_NOTES = 10


def unified_diff(path: str, before: str | None, after: str | None) -> str:
    """The diff of one file (None: no file), cut at MAX_DIFF_CHARS; a sentence when it is too large to work out."""
    old, new = split_lines(before or ""), split_lines(after or "")
    if old == new:
        return ""
    names = (
        f"a/{path.lstrip('/')}" if before is not None else "/dev/null",
        f"b/{path.lstrip('/')}" if after is not None else "/dev/null",
    )
    start, end = _common_ends(old, new)
    changed_old, changed_new = len(old) - start - end, len(new) - start - end
    if max(changed_old, changed_new) > MAX_LINES_COMPARED and changed_old and changed_new:
        counts = f"[{changed_old:,} lines became {changed_new:,}: too many to show]"
        return f"--- {names[0]}\n+++ {names[1]}\n{counts}"
    text = "\n".join([f"--- {names[0]}", f"+++ {names[1]}", *_hunks(old, new, start, end)])
    return (
        text if len(text) <= MAX_DIFF_CHARS else f"{text[:MAX_DIFF_CHARS]}\n... [diff of {len(text):,} characters cut]"
    )


def _common_ends(old: list[str], new: list[str]) -> tuple[int, int]:
    """How many lines the two begin with alike, and how many of the rest they end with alike."""
    limit = min(len(old), len(new))
    start = 0
    while start < limit and old[start] == new[start]:
        start += 1
    end = 0
    while end < limit - start and old[-1 - end] == new[-1 - end]:
        end += 1
    return start, end


class _Ends(difflib.SequenceMatcher[str]):
    """Compares what is between the ends of two texts; the context of a change may still reach into the ends."""

    def __init__(self, old: list[str], new: list[str], start: int, end: int) -> None:
        self._old_end, self._new_end = len(old) - end, len(new) - end
        super().__init__(None, old[start : self._old_end], new[start : self._new_end])
        self._start, self._end = start, end

    def get_opcodes(self) -> list[Any]:
        """The steps from one whole text to the other."""
        start, end = self._start, self._end
        between = [(step, *(line + start for line in lines)) for step, *lines in super().get_opcodes()]
        before = ("equal", 0, start, 0, start)
        after = ("equal", self._old_end, self._old_end + end, self._new_end, self._new_end + end)
        return [*([before] if start else []), *between, *([after] if end else [])]


def _hunks(old: list[str], new: list[str], start: int, end: int) -> Iterator[str]:
    for steps in _Ends(old, new, start, end).get_grouped_opcodes(CONTEXT):
        _, old_from, _, new_from, _ = steps[0]
        _, _, old_to, _, new_to = steps[-1]
        yield f"@@ -{_span(old_from, old_to)} +{_span(new_from, new_to)} @@"
        for step, i, j, k, m in steps:
            if step == "equal":
                yield from (f" {line}" for line in old[i:j])
            else:
                yield from (f"-{line}" for line in old[i:j])
                yield from (f"+{line}" for line in new[k:m])


def _span(first: int, last: int) -> str:
    """Lines as a hunk's header counts them: from 1, and an empty span by the line before it."""
    count = last - first
    if count == 1:
        return f"{first + 1}"
    return f"{first + 1 if count else first},{count}"


async def run(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Change files and return the diff."""
    mode = arguments.get("mode") or ("patch" if arguments.get("patch") else "replace")
    try:
        return await (_replace(ctx, arguments) if mode == "replace" else _patch(ctx, arguments))
    except ToolFailure as failure:
        failure.fields.setdefault("success", False)
        raise


async def _replace(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
    for needed in ("path", "old_string", "new_string"):
        if not isinstance(arguments.get(needed), str):
            raise InvalidArguments(f"mode='replace' needs path, old_string and new_string; {needed} is missing.")
    _check_text(arguments["new_string"])
    path = await ctx.workspace.resolve(arguments["path"])
    async with ctx.workspace.editing([path]):
        old = await _open(ctx, path)
        if old is None:
            raise ToolFailure(f"File not found: {path}", similar_files=await ctx.workspace.similar(path))
        done = await work_out(
            len(old.text) + len(arguments["old_string"]) + len(arguments["new_string"]),
            replace_text,
            old.text,
            _fitted(arguments["old_string"], old),
            _fitted(arguments["new_string"], old),
            bool(arguments.get("replace_all")),
        )
        new = old.with_text(done.text)
        changed = ctx.workspace.changed_since_seen(path, old.to_bytes())
        await commit(ctx.workspace, {path: old}, {path: new}, {})
    result = await work_out(len(new.text), _report, {path: old}, {path: new})
    result["replacements"] = done.count
    if done.way != "exact":
        result["match"] = f"Not exact: found by ignoring differences in {done.way}."
    return with_warning(result, [path] if changed else [])


def _check_text(text: str) -> None:
    """Lone surrogates stand for bytes of a file that are not UTF-8; the model has no way to write those."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArguments(f"The text has a lone surrogate at character {error.start}.") from None


def _fitted(piece: str, file: EditableText) -> str:
    return piece.replace("\r\n", "\n") if file.newline == "\r\n" else piece


async def _patch(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(arguments.get("patch"), str):
        raise InvalidArguments("mode='patch' needs the patch.")
    _check_text(arguments["patch"])
    changes = await work_out(len(arguments["patch"]), parse_patch, arguments["patch"])
    for change in changes:
        change.path = await ctx.workspace.resolve(change.path)
        change.move_to = await ctx.workspace.resolve(change.move_to) if change.move_to else None
    paths = paths_of(changes)
    async with ctx.workspace.editing(paths):
        opened = {path: await _open(ctx, path) for path in paths}
        texts = {path: file.text if file else None for path, file in opened.items()}
        size = len(arguments["patch"]) + sum(len(text or "") for text in texts.values())
        changed = await work_out(size, apply_changes, changes, texts)
        moves = {change.move_to: change.path for change in changes if change.move_to}
        new = {path: _rewritten(path, text, opened, moves) for path, text in changed.items()}
        stale = [
            path for path, file in opened.items() if file and ctx.workspace.changed_since_seen(path, file.to_bytes())
        ]
        await commit(ctx.workspace, opened, new, moves)
    result = await work_out(size, _report, opened, new)
    if notes := [f"{change.path}: {note}" for change in changes for note in change.notes]:
        result["match"] = f"Not exact: {'; '.join(notes[:MAX_NOTES])}."
    return with_warning(result, stale)


def _rewritten(
    path: str, text: str | None, opened: dict[str, EditableText | None], moves: dict[str, str]
) -> EditableText | None:
    """A file with its new text, in the spelling it had here or where it came from; None when it goes."""
    if text is None:
        return None
    return (opened[path] or opened.get(moves.get(path, "")) or EditableText("")).with_text(text)


def with_warning(result: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """The result, with a warning about files that were not what the model last saw of them."""
    if paths:
        result["_warning"] = (
            f"{', '.join(paths)} had changed since you last read or wrote it. Read it again to be sure."
        )
    return result


async def _open(ctx: CallContext, path: str) -> EditableText | None:
    data = await ctx.workspace.read(path, ctx.config.max_file_bytes)
    if data is None:
        return None
    if reason := binary_reason(data):
        raise ToolFailure(f"{path} is {reason}: it cannot be patched.")
    return EditableText.from_bytes(data)


def _report(old: dict[str, EditableText | None], new: dict[str, EditableText | None]) -> dict[str, Any]:
    result: dict[str, Any] = {"success": True, "diff": _diffs(old, new)}
    kinds: dict[str, list[str]] = {"files_modified": [], "files_created": [], "files_deleted": []}
    problems = {}
    for path, file in new.items():
        kind = "files_deleted" if file is None else "files_modified" if old.get(path) else "files_created"
        kinds[kind].append(path)
        before = old.get(path)
        if file is not None and (found := lint(path, before.text if before else None, file.text)):
            problems[path] = found
    result.update({kind: paths for kind, paths in kinds.items() if paths})
    if problems:
        result["lint"] = problems
    return result


def _diffs(old: dict[str, EditableText | None], new: dict[str, EditableText | None]) -> str:
    parts = []
    for path, file in new.items():
        before = old.get(path)
        parts.append(unified_diff(path, before.text if before else None, file.text if file else None))
    return "\n".join(part for part in parts if part)


TOOL = Tool(
    schema=load_schema("patch"),
    toolset="file",
    run=run,
    script_parameters=("path", "old_string", "new_string", "replace_all", "mode", "patch"),
)
