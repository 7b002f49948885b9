"""search_files: lines or names, paged, in an order that does not change from run to run."""

from __future__ import annotations

import posixpath
import shlex
from dataclasses import dataclass
from typing import Any

from agent_loop.tools.output import cut_line
from agent_loop.tools.tool import CallContext, InvalidArguments, Tool, ToolFailure, load_schema
from sandbox_pool.results import ExecResult

SKIPPED_DIRECTORIES = (
    ".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", ".tox",
    ".mypy_cache", ".pytest_cache", ".ruff_cache",
)  # fmt: skip
NO_SUCH_PATH = 97
"""Exit code of the command when the place to search does not exist."""


@dataclass(frozen=True)
class Search:
    pattern: str
    path: str
    file_glob: str | None = None
    output_mode: str = "content"
    context: int = 0


def _enter(path: str) -> str:
    """Go where the search starts, so that skipping applies only below it. `$t` is what to search: `.` or one file."""
    return (
        f"p={shlex.quote(path)}; case $p in /*) ;; *) p=$PWD/$p ;; esac; "
        f'if [ -d "$p" ]; then cd -- "$p" && t=. || exit {NO_SUCH_PATH}; '
        f'elif [ -e "$p" ]; then t=$p; else exit {NO_SUCH_PATH}; fi'
    )


def content_command(search: Search) -> str:
    """Search in files.

    Records: PATH NUL LINE `:` text (match) or `-` text (context); PATH NUL COUNT; or PATH NUL. Paths below a directory
    begin with `./`; another path is the one file that was searched.
    """
    return (
        f"( {_enter(search.path)}; if command -v rg >/dev/null 2>&1; then {_ripgrep(search)}; "
        f"elif printf x | grep -qP x 2>/dev/null; then {_grep(search, '-P')}; "
        f"elif grep -Z --exclude-dir=x -e x /dev/null 2>/dev/null; [ $? -le 1 ]; then {_grep(search, '-E')}; "
        f"else {_grep_each(search)}; fi )"
    )


def _ripgrep(search: Search) -> str:
    words = ["rg", "--no-config", "--no-messages", "--hidden", "--no-ignore", "--color=never", "--no-heading"]
    words += ["--null", "--with-filename", "--sort=path"]
    words += [word for name in SKIPPED_DIRECTORIES for word in ("--glob", f"!{name}/")]
    if search.file_glob:
        words += ["--glob", search.file_glob]
    words += {"files_only": ["--files-with-matches"], "count": ["--count"]}.get(search.output_mode, ["--line-number"])
    if search.context and search.output_mode == "content":
        words += [f"--context={search.context}", "--no-context-separator"]
    return f'{shlex.join([*words, "--regexp", search.pattern])} -- "$t"'


def _grep(search: Search, dialect: str) -> str:
    words = ["grep", "-r", "-I", "-s", "-H", "-Z", dialect]
    words += [f"--exclude-dir={name}" for name in SKIPPED_DIRECTORIES]
    if search.file_glob:
        words += [f"--include={search.file_glob}"]
    words += {"files_only": ["-l"], "count": ["-c"]}.get(search.output_mode, ["-n"])
    if search.context and search.output_mode == "content":
        words += [f"-C{search.context}", "--no-group-separator"]
    return f'{shlex.join([*words, "-e", search.pattern])} -- "$t"'


_EACH = r"""
for f; do
  [ "$(head -c 8192 "$f" | tr -d '\000' | wc -c)" = "$(head -c 8192 "$f" | wc -c)" ] || continue
  case $mode in
    files_only) grep -qE -e "$pattern" "$f" && printf '%s\0' "$f" ;;
    count) printf '%s\0%s\n' "$f" "$(grep -cE -e "$pattern" "$f")" ;;
    *) grep -nE -C "$context" -e "$pattern" "$f" | while IFS= read -r line; do printf '%s\0%s\n' "$f" "$line"; done ;;
  esac
done
"""


def _grep_each(search: Search) -> str:
    """File by file, for a grep (BusyBox's) that can neither skip directories nor end names with NUL."""
    settings = f"mode={search.output_mode} context={search.context} pattern={shlex.quote(search.pattern)}"
    name = f" -name {shlex.quote(search.file_glob)}" if search.file_glob else ""
    check = f"printf x | grep -E -e {shlex.quote(search.pattern)} >/dev/null; [ $? -le 1 ] || exit 2"
    return f"{check}; {settings} {_find(name)} -exec sh -c {shlex.quote(_EACH)} sh {{}} +"


def _find(test: str) -> str:
    pruned = " -o ".join(f"-name {shlex.quote(name)}" for name in SKIPPED_DIRECTORIES)
    return f'find "$t" -type d \\( {pruned} \\) -prune -o -type f{test}'


_STAMP_EACH = r"""for f; do printf '%s %s\0' "$(stat -c %Y "$f" 2>/dev/null || echo 0)" "$f"; done"""


def files_command(pattern: str, path: str) -> str:
    """Search for file names. Records: MTIME space PATH NUL."""
    find = _find(f" {_name_test(pattern)}")
    gnu = f"{find} -printf '%T@ %p\\0' 2>/dev/null"
    plain = f"{find} -exec sh -c {shlex.quote(_STAMP_EACH)} sh {{}} +"
    return f"( {_enter(path)}; if find /dev/null -printf '' 2>/dev/null; then {gnu}; else {plain}; fi )"


def _name_test(pattern: str) -> str:
    """A glob on the name, or on the path below the start when it has a slash."""
    if "/" not in pattern:
        return f"-name {shlex.quote(pattern)}"
    below = pattern.removeprefix("./").lstrip("/")
    tests = {f"./{below.replace('**/', '*')}", f"./{below.replace('**/', '')}", f"./{below}"}
    if not pattern.startswith(("./", "/")):
        tests.add(f"*/{below.removeprefix('**/')}")
    return "\\( " + " -o ".join(f"-path {shlex.quote(test)}" for test in sorted(tests)) + " \\)"


_TIMEOUT_S = 60
_MAX_OUTPUT_CHARS = 1_000_000
_MAX_LINE_CHARS = 500


async def run(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
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


async def _run(ctx: CallContext, command: str, base: str) -> ExecResult:
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
