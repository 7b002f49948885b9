"""Unified diffs whose cost does not explode: what both texts begin and end with is set aside before comparing."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from agent_loop.tools.text_file import split_lines

MAX_DIFF_CHARS = 20_000
MAX_LINES_COMPARED = 2_000
CONTEXT = 3


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
