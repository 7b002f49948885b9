"""write_file: replaces a whole file, atomically; an existing file keeps its mode and its newline style."""

from __future__ import annotations

import errno
import re
from typing import Any

from agent_loop.tools.files.patch import with_warning
from agent_loop.tools.files.syntax import lint
from agent_loop.tools.files.text_file import decode, newline_style, with_newlines
from agent_loop.tools.files.workspace import file_failure
from agent_loop.tools.tool import CallContext, InvalidArguments, Tool, load_schema, work_out
from sandbox_pool.errors import SandboxFileError

_OLD_BYTES = 1_000_000
_NUMBERED = re.compile(r"\s{0,8}(\d{1,9})\|")
_LINES_LOOKED_AT = 50


async def run(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Write, and say how many bytes."""
    path = await ctx.workspace.resolve(arguments["path"])
    content: str = arguments["content"]
    async with ctx.workspace.editing([path]):
        old = await _old(ctx, path)
        content = _in_style_of(old, content)
        try:
            data = content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArguments(
                f"The content has a lone surrogate at character {error.start}: it cannot be stored as UTF-8."
            ) from None
        changed = old is not None and ctx.workspace.changed_since_seen(path, old)
        await ctx.workspace.write(path, data)
    result: dict[str, Any] = {"bytes_written": len(data), "path": path}
    if found := await work_out(len(content), lint, path, None if old is None else decode(old), content):
        result["lint"] = found
    with_warning(result, [path] if changed else [])
    if _is_numbered(content):
        result["_warning"] = " ".join(
            [
                *filter(None, [result.get("_warning")]),
                "The lines begin with numbers as read_file shows them: was it meant?",
            ]
        )
    return result


def _is_numbered(content: str) -> bool:
    """Whether several lines begin with numbers that count on, and a bar: a page of read_file, not of a file."""
    numbers = [_NUMBERED.match(line) for line in content.splitlines()[:_LINES_LOOKED_AT]]
    first = int(numbers[0].group(1)) if numbers and numbers[0] else 0
    return len(numbers) > 1 and all(found and int(found.group(1)) == first + at for at, found in enumerate(numbers))


async def _old(ctx: CallContext, path: str) -> bytes | None:
    """The file before, or None when there is none, or one that is too large to be compared."""
    try:
        data = await ctx.sandbox.read_file(path, offset=0, length=_OLD_BYTES + 1)
    except SandboxFileError as error:
        if error.errno == errno.EISDIR:
            raise file_failure(path, error) from error
        return None  # no old file, or one that cannot be read: the write itself will tell
    return data if len(data) <= _OLD_BYTES else None


def _in_style_of(old: bytes | None, content: str) -> str:
    """CRLF for a file that had CRLF throughout; the model is not asked to remember that. What it says itself counts."""
    if old is None or "\n" not in content or "\r\n" in content:
        return content
    return with_newlines(content, newline_style(decode(old)))


TOOL = Tool(
    schema=load_schema("write_file"),
    toolset="file",
    run=run,
    script_parameters=("path", "content"),
)
