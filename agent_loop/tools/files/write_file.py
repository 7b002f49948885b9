"""write_file: replaces a whole file, atomically; an existing file keeps its mode and its newline style."""

from __future__ import annotations

import errno
from typing import Any

from agent_loop.tools.files.syntax import syntax_error
from agent_loop.tools.files.text_file import decode, newline_style, with_newlines
from agent_loop.tools.files.workspace import file_failure
from agent_loop.tools.tool import CallContext, InvalidArguments, Tool, load_schema
from sandbox_pool.errors import SandboxFileError

_STYLE_SAMPLE_BYTES = 64_000


async def run(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Write, and say how many bytes."""
    path = await ctx.workspace.resolve(arguments["path"])
    content: str = arguments["content"]
    async with ctx.workspace.editing([path]):
        content = await _in_style_of_old(ctx, path, content)
        try:
            data = content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArguments(
                f"The content has a lone surrogate at character {error.start}: it cannot be stored as UTF-8."
            ) from None
        await ctx.workspace.write(path, data)
    result: dict[str, Any] = {"bytes_written": len(data), "path": path}
    if problem := syntax_error(path, content):
        result["lint"] = {"status": "error", "output": problem}
    return result


async def _in_style_of_old(ctx: CallContext, path: str, content: str) -> str:
    """CRLF for a file that had CRLF throughout; the model is not asked to remember that. What it says itself counts."""
    if "\n" not in content or "\r\n" in content:
        return content
    try:
        sample = await ctx.sandbox.read_file(path, offset=0, length=_STYLE_SAMPLE_BYTES)
    except SandboxFileError as error:
        if error.errno == errno.EISDIR:
            raise file_failure(path, error) from error
        return content  # no old file, or one that cannot be read: the write itself will tell
    return with_newlines(content, "\r\n") if newline_style(decode(sample)) == "\r\n" else content


TOOL = Tool(
    schema=load_schema("write_file"),
    toolset="file",
    run=run,
    script_parameters=("path", "content"),
)
