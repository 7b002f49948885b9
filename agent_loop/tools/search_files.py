"""search_files: lines or names, paged, in an order that does not change from run to run."""

from __future__ import annotations

import posixpath
from typing import Any

from agent_loop.tools.errors import InvalidArguments, ToolFailure
from agent_loop.tools.hygiene import cut_line
from agent_loop.tools.search_command import NO_SUCH_PATH, Search, content_command, files_command
from agent_loop.tools.tool import Tool, ToolContext, load_schema
from sandbox_pool.results import ExecResult

_TIMEOUT_S = 60
_MAX_OUTPUT_CHARS = 1_000_000
_MAX_LINE_CHARS = 500


async def run(ctx: ToolContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Search contents or names, and return one page."""
    pattern = arguments["pattern"]
    if not pattern or "\0" in pattern:
        raise InvalidArguments("The pattern is empty or has a NUL character.")
    base = arguments.get("path") or "."
    path = await ctx.workspace.resolve(base)
    offset, limit = max(0, arguments.get("offset") or 0), min(1000, max(1, arguments.get("limit") or 50))
    if arguments.get("target") == "files":
        rows = _file_rows(await _run(ctx, files_command(pattern, path), base))
        return _files_page([_joined(base, row) for row in rows], offset, limit)
    search = Search(
        pattern,
        path,
        arguments.get("file_glob") or None,
        arguments.get("output_mode") or "content",
        min(50, max(0, arguments.get("context") or 0)),
    )
    result = await _run(ctx, content_command(search), base)
    return _content_page(search, result, base, offset, limit)


async def _run(ctx: ToolContext, command: str, base: str) -> ExecResult:
    try:
        command.encode()
    except UnicodeEncodeError:
        raise InvalidArguments("The pattern or the file_glob has characters that are not valid Unicode.") from None
    if "\0" in command:
        raise InvalidArguments("The file_glob has a NUL character.")
    result = await ctx.sandbox.exec(
        command, timeout_s=_TIMEOUT_S, merge_stderr=False, max_output_chars=_MAX_OUTPUT_CHARS
    )
    if result.exit_code == NO_SUCH_PATH:
        raise ToolFailure(f"Path not found: {base}")
    if result.timed_out:
        raise ToolFailure(f"The search took longer than {_TIMEOUT_S} s: narrow it with path or file_glob.")
    if result.exit_code > 1 and not result.output:
        raise ToolFailure(f"The search failed: {result.stderr.strip()[:1000] or f'exit code {result.exit_code}'}")
    return result


def _file_rows(result: ExecResult) -> list[str]:
    """Paths, newest first; files of the same age by name."""
    found = []
    for record in _whole(result, "\0").split("\0"):
        stamp, _, name = record.partition(" ")
        if name:
            found.append((-_seconds(stamp), name))
    return [name for _, name in sorted(found)]


def _seconds(stamp: str) -> float:
    try:
        return float(stamp)
    except ValueError:
        return 0.0


def _whole(result: ExecResult, end: str) -> str:
    """The output up to the last whole record; of a cut output, the part before the cut."""
    if result.truncation is None:
        return result.output
    head = result.output[: int(_MAX_OUTPUT_CHARS * 0.4)]
    return head[: head.rfind(end) + 1]


def _files_page(names: list[str], offset: int, limit: int) -> dict[str, Any]:
    return _paged({"total_count": len(names), "files": names[offset : offset + limit]}, len(names), offset, limit)


def _paged(result: dict[str, Any], total: int, offset: int, limit: int) -> dict[str, Any]:
    result["truncated"] = offset + limit < total
    if result["truncated"]:
        result["hint"] = f"{total - offset - limit} more: go on with offset={offset + limit}, or narrow the search."
    return result


def _content_page(search: Search, result: ExecResult, base: str, offset: int, limit: int) -> dict[str, Any]:
    text = _whole(result, "\0" if search.output_mode == "files_only" else "\n")
    if search.output_mode == "files_only":
        names = sorted(_joined(base, name) for name in text.split("\0") if name)
        return _noted(_files_page(names, offset, limit), result)
    records = _records(text)
    if search.output_mode == "count":
        counts = sorted((_joined(base, name), int(rest)) for name, rest in records if rest.isdigit() and int(rest))
        shown = dict(counts[offset : offset + limit])
        return _noted(
            _paged({"total_count": sum(n for _, n in counts), "counts": shown}, len(counts), offset, limit), result
        )
    return _noted(_match_page(records, base, offset, limit), result)


def _noted(page: dict[str, Any], result: ExecResult) -> dict[str, Any]:
    if result.truncation is not None:
        page["note"] = (
            "There are more matches than could be collected: counts are of the first ones. Narrow the search."
        )
    return page


def _records(text: str) -> list[tuple[str, str]]:
    """(path, rest of the line) of each record. A path may have newlines: only the NUL ends it."""
    records = []
    at = 0
    while (nul := text.find("\0", at)) >= 0:
        end = text.find("\n", nul)
        end = len(text) if end < 0 else end
        records.append((text[at:nul], text[nul + 1 : end]))
        at = end + 1
    return records


def _match_page(records: list[tuple[str, str]], base: str, offset: int, limit: int) -> dict[str, Any]:
    """Matches are counted and paged; context lines go with the page they fall into."""
    rows = []
    for name, rest in records:
        number, kind, line = _numbered(rest)
        if number is not None:
            rows.append((_joined(base, name), number, kind == ":", line))
    rows.sort(key=lambda row: (row[0], row[1]))
    total = sum(is_match for *_, is_match, _ in rows)
    matches, seen = [], 0
    for name, number, is_match, line in rows:
        seen += is_match
        position = seen if is_match else seen + 1
        if offset < position <= offset + limit or (not is_match and offset < seen <= offset + limit):
            matches.append({"path": name, "line": number, "content": cut_line(line, _MAX_LINE_CHARS)})
            if not is_match:
                matches[-1]["context"] = True
    return _paged({"total_count": total, "matches": matches}, total, offset, limit)


def _numbered(rest: str) -> tuple[int | None, str, str]:
    digits = len(rest) - len(rest.lstrip("0123456789"))
    if not digits or rest[digits : digits + 1] not in (":", "-"):
        return None, "", ""
    return int(rest[:digits]), rest[digits], rest[digits + 1 :]


def _joined(base: str, found: str) -> str:
    """The found path as the model can use it: below the directory it gave, or the one file it gave."""
    return posixpath.normpath(posixpath.join(base, found[2:])) if found.startswith("./") else base


TOOL = Tool(
    schema=load_schema("search_files"),
    toolset="file",
    run=run,
    parallel_safe=True,
    script_parameters=("pattern", "target", "path", "file_glob", "limit", "offset", "output_mode", "context"),
)
