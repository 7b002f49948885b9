"""The todo tool: one task list per rollout, replaced or merged by id."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from agent_loop.tools.tool import CallContext, InvalidArguments, Tool, load_schema

STATUSES = ("pending", "in_progress", "completed", "cancelled")
MAX_ITEMS = 200


@dataclass
class TodoList:
    """Ordered items with unique ids; order is priority."""

    _items: dict[str, dict[str, str]] = field(default_factory=dict)

    def replace(self, items: list[dict[str, Any]]) -> None:
        """Start over with these items; of items with the same id the last one counts."""
        fresh = {item["id"]: item for item in (_whole_item(raw) for raw in items)}
        self._items = _limited(fresh)

    def merge(self, items: list[dict[str, Any]]) -> None:
        """Update items by id, field by field, and append new ones."""
        merged = {item_id: dict(item) for item_id, item in self._items.items()}
        for raw in items:
            item_id = _item_id(raw)
            known = merged.get(item_id)
            merged[item_id] = _whole_item({**known, **_given(raw)} if known else raw)
        self._items = _limited(merged)

    def snapshot(self) -> dict[str, Any]:
        """The list and its counts, as the model reads them."""
        items = list(self._items.values())
        counts = {status: sum(item["status"] == status for item in items) for status in STATUSES}
        return {"todos": items, "summary": {"total": len(items), **counts}}


def _limited(items: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    if len(items) > MAX_ITEMS:
        raise InvalidArguments(f"The list would have {len(items)} items; at most {MAX_ITEMS} are kept.")
    return items


def _item_id(raw: dict[str, Any]) -> str:
    item_id = str(raw.get("id", "")).strip()
    if not item_id:
        raise InvalidArguments("Every todo item needs an id.")
    return item_id


def _given(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if value is not None}


def _whole_item(raw: dict[str, Any]) -> dict[str, str]:
    item_id = _item_id(raw)
    content = str(raw.get("content") or "").strip()
    if not content:
        raise InvalidArguments(f"Todo item {item_id!r} needs content.")
    status = str(raw.get("status") or "pending").strip().lower()
    if status not in STATUSES:
        raise InvalidArguments(f"Todo item {item_id!r} has status {status!r}; valid: {', '.join(STATUSES)}.")
    return {"id": item_id, "content": content, "status": status}


async def run(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """Read the list, or write it and read it back."""
    todos = arguments.get("todos")
    if todos is not None:
        (ctx.todo.merge if arguments.get("merge") else ctx.todo.replace)(todos)
    return ctx.todo.snapshot()


TOOL = Tool(schema=load_schema("todo"), toolset="todo", run=run)
