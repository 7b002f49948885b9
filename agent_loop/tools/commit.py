"""Writes the outcome of a patch: every file, or none. A refusal or a cancellation half way puts everything back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from agent_loop.tools.errors import InvalidArguments, ToolFailure
from agent_loop.tools.text_file import EditableText
from agent_loop.tools.workspace import Workspace

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
