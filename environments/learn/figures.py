"""Figures of rollouts for a line of metrics.jsonl: success by the verifier, errors clustered by task, parse rate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent_loop.cpu_model.prefix import common_prefix
from agent_loop.records import RolloutRecord
from environments.estimates import mean
from environments.report.read import read_rollouts
from environments.summary import summarize_slice


def parses(record: RolloutRecord) -> bool:
    """Whether the answer has a tool call and every call in it fits its schema."""
    attempted = record.metrics.get("tool_calls_attempted", 0.0)
    return attempted > 0 and record.metrics.get("tool_calls_schema_valid", 0.0) == attempted


def parse_rate(records: Sequence[RolloutRecord]) -> float | None:
    """Share of answers that parse, of rollouts that show the policy."""
    return mean([float(parses(record)) for record in records if record.trainable])


def success(records: Sequence[RolloutRecord]) -> dict[str, Any]:
    """Mean verifier score with its standard error, clustered by task; shaping does not enter."""
    figures = summarize_slice("", records)
    return {
        "success": figures.mean_score,
        "standard_error": figures.standard_error,
        "rollouts": figures.scored,
        "parse_rate": parse_rate(records),
    }


def evaluation_figures(records: Sequence[RolloutRecord], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Figures of one evaluation, over all and by kind of task; `kinds` names the kind of each item."""
    by_kind: defaultdict[str, list[RolloutRecord]] = defaultdict(list)
    for record in records:
        by_kind[kinds[record.item_id]].append(record)
    return {
        **success(records),
        "items": len({record.item_id for record in records}),
        "lost": sum(not record.trainable for record in records),
        "by_kind": {kind: success(by_kind[kind]) for kind in sorted(by_kind)},
    }


def shared_prompt(path: Path) -> list[int]:
    """Token ids that all prompts of a rollouts.jsonl begin with: system prompt and examples. Blocking."""
    calls = (record.sampled_calls for record in read_rollouts(path))
    return common_prefix(sampled[0].prompt_ids for sampled in calls if sampled)


class RolloutTail:
    """Reads what is appended to a rollouts.jsonl."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    def new(self) -> list[RolloutRecord]:
        """Rollouts since the last call. Blocking."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        return [RolloutRecord.from_json(line) for line in whole.splitlines()]
