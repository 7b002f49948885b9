"""read_file: a page of numbered lines. One read of the sandbox for ordinary files, one command for huge ones."""

from __future__ import annotations

import errno
import hashlib
import posixpath
import shlex
from typing import Any

from agent_loop.tools.files.text_file import binary_reason, decode_for_reading, split_lines
from agent_loop.tools.files.workspace import file_failure
from agent_loop.tools.output import cut_line, dump
from agent_loop.tools.tool import CallContext, Tool, ToolFailure, load_schema
from sandbox_pool.errors import SandboxFileError

_IMAGES = frozenset((".png", ".jpg", ".jpeg", ".gif", ".webp", ".bmp", ".ico", ".tiff"))
_SAME_READS_BEFORE_WARNING = 3
_OTHER_FIELDS_CHARS = 600
"""Room for what stands beside the lines in a result."""


async def run(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Numbered lines from `offset` on, with total_lines."""
    path = await ctx.workspace.resolve(arguments["path"])
    offset, limit = max(1, arguments.get("offset") or 1), min(2000, max(1, arguments.get("limit") or 500))
    try:
        data = await ctx.sandbox.read_file(path, offset=0, length=ctx.config.max_file_bytes + 1)
    except SandboxFileError as error:
        raise await _unreadable(ctx, path, error) from error
    if reason := binary_reason(data):
        kind = "an image" if posixpath.splitext(path)[1].lower() in _IMAGES else reason
        raise ToolFailure(f"{path} is {kind}: it cannot be shown as text.", is_binary=True)
    if len(data) > ctx.config.max_file_bytes:
        return await _huge(ctx, path, offset, limit)
    text, bad_bytes = decode_for_reading(data)
    lines = split_lines(text.removeprefix("\ufeff"))
    shown = [cut_line(line, ctx.config.max_line_chars) for line in lines[offset - 1 : offset - 1 + limit]]
    result = page(shown, offset, len(lines), ctx)
    result["file_size"] = len(data)
    if bad_bytes:
        result["encoding_note"] = f"{bad_bytes:,} bytes are not UTF-8; each is shown as \ufffd."
    ctx.workspace.saw(path, data)
    _warn_of_repeats(ctx, result, (path, offset, limit), data)
    return result


def page(lines: list[str], offset: int, total_lines: int, ctx: CallContext) -> dict[str, Any]:
    """The result for these lines: as many as the budget takes, and where to go on."""
    shown: list[str] = []
    left = ctx.config.max_read_chars - _OTHER_FIELDS_CHARS
    for number, line in enumerate(lines, start=offset):
        row = f"{number}|{line}"
        size = len(dump(row))  # as the model reads it, with escapes
        if shown and size >= left:
            break
        shown.append(row)
        left -= size
    result: dict[str, Any] = {"content": "\n".join(shown), "total_lines": total_lines}
    following = offset + len(shown)
    result["truncated"] = following <= total_lines and bool(shown)
    if result["truncated"]:
        result["next_offset"] = following
        result["hint"] = f"Lines {following} to {total_lines} follow: read on with offset={following}."
    elif not shown and total_lines:
        result["hint"] = f"The file has {total_lines} lines: offset={offset} is behind its end."
    return result


_HUGE_SCRIPT = r"""LC_ALL=C awk -v a={first} -v b={last} -v w={width} '
NR >= a && NR <= b {{ if (length($0) > w) print substr($0, 1, w) "... [line of " length($0) " bytes cut]"; else print }}
END {{ print NR > "/dev/stderr" }}' < {path}"""


async def _huge(ctx: CallContext, path: str, offset: int, limit: int) -> dict[str, Any]:
    """Lines of a file that is not worth moving: counted and cut inside the sandbox."""
    command = _HUGE_SCRIPT.format(
        first=offset, last=offset + limit - 1, width=ctx.config.max_line_chars, path=shlex.quote(path)
    )
    budget = ctx.config.max_read_chars * 4
    result = await ctx.sandbox.exec(f"( {command} )", timeout_s=120, merge_stderr=False, max_output_chars=budget)
    counted = result.stderr.strip()
    if result.exit_code != 0 or not counted.isdigit():
        raise ToolFailure(f"{path} is too large to read here: use head, tail or sed in the terminal.")
    lines = split_lines(result.output)
    if result.truncation:
        lines = split_lines(result.output[: budget // 4])[:-1]
    found = page(lines, offset, int(counted), ctx)
    found["file_size_note"] = f"The file is larger than {ctx.config.max_file_bytes:,} bytes."
    return found


async def _unreadable(ctx: CallContext, path: str, error: SandboxFileError) -> ToolFailure:
    if error.errno == errno.ENOENT:
        similar = await ctx.workspace.similar(path)
        failure = ToolFailure(f"File not found: {path}")
        if similar:
            failure.fields["similar_files"] = similar
        return failure
    if error.errno == errno.EISDIR:
        return ToolFailure(f"{path} is a directory. List it with search_files(target='files') or ls.")
    return file_failure(path, error)


def _warn_of_repeats(ctx: CallContext, result: dict[str, Any], key: tuple[str, int, int], data: bytes) -> None:
    """The same page of the same bytes again and again is a loop; the model is told, never refused."""
    same = ctx.workspace.count_read((key, hashlib.sha256(data).digest()))
    if same >= _SAME_READS_BEFORE_WARNING:
        result["_warning"] = f"You have read exactly this {same} times in a row and the file has not changed."


TOOL = Tool(
    schema=load_schema("read_file"),
    toolset="file",
    run=run,
    parallel_safe=True,
    script_parameters=("path", "offset", "limit"),
)
