"""Export for supervised fine-tuning: conversations with structured tool calls, one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import orjson

from agent_loop.records.record import RolloutRecord


def export_sft(records: Iterable[RolloutRecord], path: Path, min_score: float = 1.0) -> int:
    """Write the trainable rollouts with at least this score; returns how many there were."""
    count = 0
    part = path.with_suffix(".part")
    with part.open("wb") as out:
        for record in records:
            if not record.trainable or record.score is None or record.score < min_score:
                continue
            example = {
                "id": record.rollout_id,
                "messages": record.messages,
                "tools": record.tools,
                "score": record.score,
                "item_id": record.item_id,
            }
            out.write(orjson.dumps(example) + b"\n")
            count += 1
    part.replace(path)
    return count
