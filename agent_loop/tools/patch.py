"""patch: a replacement in one file, or a V4A patch over several, all or nothing."""

from __future__ import annotations

from typing import Any

from agent_loop.tools.commit import commit
from agent_loop.tools.diff import unified_diff
from agent_loop.tools.errors import InvalidArguments, ToolFailure
from agent_loop.tools.replace import replace_text
from agent_loop.tools.syntax import syntax_error
from agent_loop.tools.text_file import EditableText, binary_reason
from agent_loop.tools.tool import Tool, ToolContext, load_schema
from agent_loop.tools.v4a import parse_patch
from agent_loop.tools.v4a_apply import apply_changes, paths_of


async def run(ctx: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Change files and return the diff."""
    mode = arguments.get("mode") or ("patch" if arguments.get("patch") else "replace")
    try:
        return await (_replace(ctx, arguments) if mode == "replace" else _patch(ctx, arguments))
    except ToolFailure as failure:
        failure.fields.setdefault("success", False)
        raise


async def _replace(ctx: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    for needed in ("path", "old_string", "new_string"):
        if not isinstance(arguments.get(needed), str):
            raise InvalidArguments(f"mode='replace' needs path, old_string and new_string; {needed} is missing.")
    _check_text(arguments["new_string"])
    path = await ctx.workspace.resolve(arguments["path"])
    async with ctx.workspace.editing([path]):
        old = await _open(ctx, path)
        if old is None:
            raise ToolFailure(f"File not found: {path}", similar_files=await ctx.workspace.similar(path))
        done = replace_text(
            old.text,
            _fitted(arguments["old_string"], old),
            _fitted(arguments["new_string"], old),
            bool(arguments.get("replace_all")),
        )
        new = old.with_text(done.text)
        await commit(ctx.workspace, {path: old}, {path: new}, {})
    result = _report({path: old}, {path: new})
    result["replacements"] = done.count
    if done.way != "exact":
        result["match"] = f"Not exact: found by ignoring differences in {done.way}."
    return result


def _check_text(text: str) -> None:
    """Lone surrogates stand for bytes of a file that are not UTF-8; the model has no way to write those."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArguments(f"The text has a lone surrogate at character {error.start}.") from None


def _fitted(piece: str, file: EditableText) -> str:
    return piece.replace("\r\n", "\n") if file.newline == "\r\n" else piece


async def _patch(ctx: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(arguments.get("patch"), str):
        raise InvalidArguments("mode='patch' needs the patch.")
    _check_text(arguments["patch"])
    changes = parse_patch(arguments["patch"])
    for change in changes:
        change.path = await ctx.workspace.resolve(change.path)
        change.move_to = await ctx.workspace.resolve(change.move_to) if change.move_to else None
    paths = paths_of(changes)
    async with ctx.workspace.editing(paths):
        opened = {path: await _open(ctx, path) for path in paths}
        texts = {path: file.text if file else None for path, file in opened.items()}
        changed = apply_changes(changes, texts)
        moves = {change.move_to: change.path for change in changes if change.move_to}
        new = {
            path: None
            if text is None
            else (opened[path] or opened.get(moves.get(path, "")) or EditableText("")).with_text(text)
            for path, text in changed.items()
        }
        await commit(ctx.workspace, opened, new, moves)
    return _report(opened, new)


async def _open(ctx: ToolContext, path: str) -> EditableText | None:
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
        if file is not None and (problem := syntax_error(path, file.text)):
            problems[path] = {"status": "error", "output": problem}
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
