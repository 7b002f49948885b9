"""Budgets for tool results: each result and all results of a turn fit their characters, the whole is kept elsewhere.

Long results become head and tail with the path of the whole in the sandbox (`ToolRuntime.store_result`).
A result that was valid JSON stays valid JSON.
"""

from __future__ import annotations

import asyncio
import bisect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_loop.turn.tool_call import ToolCallRecord
from sandbox_pool.errors import SandboxError

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 60.0
MIN_CHARS = 400
"""Below this there is no room for head, tail and the note."""
HEAD_SHARE = 0.4
"""The rest is tail: errors stand at the end."""
MAX_PARSED_CHARS = 2_000_000
"""Longer texts are not parsed: that would stall every other rollout on the event loop."""

PAGED_TOOL = "read_file"
"""Its file is there to be read on: no whole is stored, and no page is ever cut in its middle."""

Store = Callable[[str], Awaitable[str | None]]


def shorten(text: str, limit_chars: int, path: str | None = None) -> str:
    """The text itself if it fits, else its head and tail in at most max(limit, MIN_CHARS) characters."""
    limit = max(limit_chars, MIN_CHARS)
    if len(text) <= limit:
        return text
    kind = text.lstrip()[:1]
    if kind not in {"{", "["}:
        return _plain(text, limit, path)
    if len(text) > MAX_PARSED_CHARS:
        return _wrapped(text, limit, path)
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return _plain(text, limit, path)
    return _json(data, text, limit, path)


def shorten_result(name: str, text: str, limit_chars: int, path: str | None = None) -> str:
    """A tool's result within the limit. A page of a file keeps whole lines and says where to read on."""
    page = _shorter_page(text, max(limit_chars, MIN_CHARS)) if name == PAGED_TOOL else None
    return page or shorten(text, limit_chars, path)


def _shorter_page(text: str, limit: int) -> str | None:
    """The page with as many lines as fit; None when the text is not a page, or not one line fits."""
    data = _page(text)
    if data is None:
        return None
    lines = data["content"].split("\n")
    first = int(lines[0].partition("|")[0])

    def render(count: int) -> str:
        following = first + count
        said = f"Lines {following} to {data['total_lines']} follow: read on with offset={following}."
        more = {"truncated": True, "next_offset": following, "hint": said}
        return _dumps({**data, "content": "\n".join(lines[:count]), **more})

    count = bisect.bisect_right(range(1, len(lines)), limit, key=lambda count: len(render(count)))
    return render(count) if count else None


def _page(text: str) -> dict[str, Any] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    is_page = isinstance(data, dict) and {"content", "total_lines", "truncated"} <= data.keys()
    return data if is_page and data["content"][:1].isdigit() else None


def _note(omitted: int, total: int, path: str | None) -> str:
    where = f"; the whole is in {path}" if path else ""
    return f"{omitted} of {total} characters left out{where}"


def _plain(text: str, limit: int, path: str | None) -> str:
    room = limit - len(_note(len(text), len(text), path)) - 12
    head, tail = _split(max(room, 0))
    note = _note(len(text) - head - tail, len(text), path)
    return f"{text[:head]}\n[... {note} ...]\n{text[len(text) - tail :]}"


def _wrapped(text: str, limit: int, path: str | None) -> str:
    def render(chars: int) -> str:
        head, tail = _split(chars)
        note = _note(len(text) - head - tail, len(text), path)
        return _dumps({"truncated": note, "head": text[:head], "tail": text[len(text) - tail :]})

    return _largest(render, limit, limit) or _dumps({"truncated": _note(len(text), len(text), None)})


def _json(data: Any, text: str, limit: int, path: str | None) -> str:
    if not isinstance(data, dict):
        return _wrapped(text, limit, path)
    lengths = sorted(_string_lengths(data), reverse=True)
    skeleton = len(_dumps(data)) - sum(lengths)

    def render(cap: int) -> str:
        omitted = sum(length - cap for length in lengths if length > cap)
        return _dumps({**_cut(data, cap), "truncated": _note(omitted, len(text), path)})

    cap = level(lengths, limit - skeleton)
    return _largest(render, cap, limit) or _wrapped(text, limit, path)


def _largest(render: Callable[[int], str], start: int, limit: int) -> str | None:
    """The first rendering that fits, trying smaller and smaller caps: escapes make the exact size unforeseeable."""
    cap = start
    while cap > 40:
        text = render(cap)
        if len(text) <= limit:
            return text
        cap = min(cap * 9 // 10, cap - (len(text) - limit) // 8)
    return None


def level(lengths: list[int], total: int) -> int:
    """The greatest cap c with sum(min(length, c)) <= total; lengths in descending order."""
    rest = sum(lengths)
    for index, length in enumerate(lengths):
        rest -= length
        following = lengths[index + 1] if index + 1 < len(lengths) else 0
        cap = (total - rest) // (index + 1)
        if cap >= following:
            return max(min(cap, length), 0)
    return max(total, 0)


def _string_lengths(data: Any) -> list[int]:
    lengths: list[int] = []
    stack = [data]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            lengths.append(len(item))
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return lengths


def _cut(data: Any, cap: int) -> Any:
    if isinstance(data, str):
        return _cut_string(data, cap)
    if isinstance(data, dict):
        return {key: _cut(value, cap) for key, value in data.items()}
    if isinstance(data, list):
        return [_cut(value, cap) for value in data]
    return data


def _cut_string(text: str, cap: int) -> str:
    if len(text) <= cap:
        return text
    head, tail = _split(max(cap - 30, 0))
    return f"{text[:head]} [... {len(text) - head - tail} left out ...] {text[len(text) - tail :]}"


def _split(room: int) -> tuple[int, int]:
    head = int(room * HEAD_SHARE)
    return head, room - head


def _dumps(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False)


@dataclass(frozen=True)
class ResultBudget:
    """Characters of tool results that reach the model."""

    per_result_chars: int = 100_000
    per_turn_chars: int = 200_000
    preview_chars: int = 1_500
    """A turn over budget never shortens a result below this."""
    overrides: Mapping[str, int | None] = field(default_factory=dict)
    """Limits of single tools by name; None is no limit."""

    def limit_for(self, name: str) -> int | None:
        """Characters one result of this tool may have."""
        return self.overrides.get(name, self.per_result_chars)


async def apply_budget(calls: Sequence[ToolCallRecord], budget: ResultBudget, store: Store) -> None:
    """Shorten the texts of one turn's calls to their budgets, storing each shortened one once."""
    whole = [call.text for call in calls]
    for call, text in zip(calls, whole, strict=True):
        limit = budget.limit_for(call.name)
        if limit is not None and len(text) > limit:
            await _shorten_call(call, text, limit, store)
    if sum(len(call.text) for call in calls) <= budget.per_turn_chars:
        return
    cap = level(sorted((len(call.text) for call in calls), reverse=True), budget.per_turn_chars)
    cap = max(cap, budget.preview_chars)
    for call, text in zip(calls, whole, strict=True):
        if len(call.text) > cap:
            await _shorten_call(call, text, cap, store)


async def _shorten_call(call: ToolCallRecord, whole: str, limit: int, store: Store) -> None:
    shorter = _shorter_page(whole, max(limit, MIN_CHARS)) if call.name == PAGED_TOOL else None
    if shorter is None:
        call.stored_path = call.stored_path or await _stored(whole, store)
        shorter = shorten(whole, limit, call.stored_path)
    call.text = shorter


async def _stored(text: str, store: Store) -> str | None:
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            return await store(text)
    except (SandboxError, OSError) as error:
        # The result itself is there; a sandbox that is really gone shows itself at the next call.
        log.warning("a long tool result could not be stored: %s", error)
        return None
