"""Stored rollouts for tests that need some and do not care how they came about."""

from __future__ import annotations

from typing import Any

from agent_loop.records.record import RolloutRecord


def record(group_id: str = "g", number: int = 0, score: float | None = 1.0, **more: Any) -> RolloutRecord:
    fields: dict[str, Any] = {
        "rollout_id": f"{group_id}/{number}",
        "group_id": group_id,
        "environment": "test",
        "item_id": f"item-{group_id}",
        "outcome": "finished" if score is not None else "api_error",
        "trainable": score is not None,
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
        "score": score,
        "verifier_score": score,
    }
    return RolloutRecord(**(fields | more))
