"""Unified diffs whose cost does not explode: what both texts begin and end with is set aside before comparing."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from agent_loop.tools.text_file import split_lines

MAX_DIFF_CHARS = 20_000
MAX_LINES_COMPARED = 2_000
CONTEXT = 3


def unified_diff(path: str, before: str | None, after: str | None) -> str:
    """The diff of one file (None: no file), cut at MAX_DIFF_CHARS; a sentence when it is too large to work out."""
    old, new = split_lines(before or ""), split_lines(after or "")
    start, end = _common_ends(old, new)
    start, end = max(0, start - CONTEXT), max(0, end - CONTEXT)
    changed_old, changed_new = old[start : len(old) - end], new[start : len(new) - end]
    names = (
        f"a/{path.lstrip('/')}" if before is not None else "/dev/null",
        f"b/{path.lstrip('/')}" if after is not None else "/dev/null",
    )
    if max(len(changed_old), len(changed_new)) > MAX_LINES_COMPARED and changed_old and changed_new:
        counts = f"[{len(changed_old):,} lines became {len(changed_new):,}: too many to show]"
        return f"--- {names[0]}\n+++ {names[1]}\n{counts}"
    text = "\n".join(_shifted(difflib.unified_diff(changed_old, changed_new, *names, lineterm="", n=CONTEXT), start))
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


def _shifted(lines: Iterable[str], start: int) -> list[str]:
    """Hunk headers with line numbers of the whole file. Lines of the file itself have a sign before them."""
    return [_shift_header(line, start) if line.startswith("@@") else line for line in lines]


def _shift_header(line: str, start: int) -> str:
    _, old, new, _ = line.split(" ", 3)
    return f"@@ -{_shift(old[1:], start)} +{_shift(new[1:], start)} @@"


def _shift(span: str, start: int) -> str:
    first, _, size = span.partition(",")
    return f"{int(first) + start}{',' + size if size else ''}"
