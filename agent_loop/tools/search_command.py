"""Builds the one shell command that a search runs: ripgrep where the sandbox has it, else grep and find.

Both engines look at the same files: hidden ones too, `.git` and the other bulk directories not, no ignore files. The
output is records that end in LF, with a NUL after the path, so that no file name can be taken for anything else.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

SKIPPED_DIRECTORIES = (
    ".git", ".hg", ".svn", "node_modules", "__pycache__", ".venv", ".tox",
    ".mypy_cache", ".pytest_cache", ".ruff_cache",
)  # fmt: skip
NO_SUCH_PATH = 97
"""Exit code of the command when the place to search does not exist."""


@dataclass(frozen=True)
class Search:
    """What to look for."""

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
