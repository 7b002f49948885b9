"""Budgets for tool results: each result and all results of a turn fit their characters, the whole is kept elsewhere.

Long results become head and tail with the path of the whole in the sandbox (`ToolRuntime.store_result`).
A result that was valid JSON stays valid JSON.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent_loop.shorten import level, shorten
from sandbox_pool.errors import SandboxError

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 60.0

Store = Callable[[str], Awaitable[str | None]]


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


@dataclass(frozen=True)
class BudgetedResult:
    """One result on its way to the model."""

    name: str
    whole: str
    text: str
    stored_path: str | None = None


async def apply_budget(results: Sequence[tuple[str, str]], budget: ResultBudget, store: Store) -> list[BudgetedResult]:
    """Shorten (tool name, text) results of one turn to their budgets, storing each shortened one once."""
    kept = [BudgetedResult(name, text, text) for name, text in results]
    for index, result in enumerate(kept):
        limit = budget.limit_for(result.name)
        if limit is not None and len(result.text) > limit:
            kept[index] = await _shortened(result, limit, store)
    if sum(len(result.text) for result in kept) <= budget.per_turn_chars:
        return kept
    cap = level(sorted((len(result.text) for result in kept), reverse=True), budget.per_turn_chars)
    cap = max(cap, budget.preview_chars)
    return [await _shortened(result, cap, store) if len(result.text) > cap else result for result in kept]


async def _shortened(result: BudgetedResult, limit: int, store: Store) -> BudgetedResult:
    path = result.stored_path or await _stored(result.whole, store)
    return replace(result, text=shorten(result.whole, limit, path), stored_path=path)


async def _stored(text: str, store: Store) -> str | None:
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S):
            return await store(text)
    except (SandboxError, OSError) as error:
        # The result itself is there; a sandbox that is really gone shows itself at the next call.
        log.warning("a long tool result could not be stored: %s", error)
        return None
