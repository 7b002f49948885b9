"""Evaluation of a run: held-out tasks, always the same ones, sampled at the model's `/eval` address."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_loop.local_models.cpu_model.shared_reading import common_prefix
from agent_loop.model.backends.backend import GROUP
from agent_loop.records.record import RolloutRecord
from environments.apps.learn.plan import LearnRunConfig
from environments.base import HermesAgentBaseEnv
from environments.config.settings import ServerConfig
from environments.rollouts.evaluation import evaluation_rollouts, store_records
from environments.rollouts.planning import item_field
from environments.rollouts.rollouts import GroupResult, Rollouts
from environments.runs.report.html_page import read_rollouts
from environments.runs.summary import mean, summarize_slice


def parses(record: RolloutRecord) -> bool:
    """Whether the answer has a tool call, and every call fits its schema."""
    attempted = record.metrics.get("tool_calls_attempted", 0.0)
    return attempted > 0 and record.metrics.get("tool_calls_schema_valid", 0.0) == attempted


def parse_rate(records: Sequence[RolloutRecord]) -> float | None:
    """Share of answers that parse, among trainable rollouts."""
    return mean([float(parses(record)) for record in records if record.trainable])


def solved_share(records: Sequence[RolloutRecord]) -> float | None:
    """Share of trainable rollouts with the full score: training may give partial credit."""
    return mean([float((record.verifier_score or 0.0) >= 1.0) for record in records if record.trainable])


def success(records: Sequence[RolloutRecord]) -> dict[str, Any]:
    """Mean verifier score with its standard error, clustered by task, without shaping."""
    figures = summarize_slice("", records)
    return {
        "success": figures.mean_score,
        "standard_error": figures.standard_error,
        "rollouts": figures.scored,
        "parse_rate": parse_rate(records),
    }


def evaluation_figures(records: Sequence[RolloutRecord], kinds: Mapping[str, str]) -> dict[str, Any]:
    """Figures of one evaluation, in total and by kind of task; `kinds` gives the kind of each item."""
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


GROUPS_AT_ONCE = 3
"""One is sampled while the tools of another run and a third is verified."""

Progress = Callable[[int, int], None]


@dataclass
class Evaluator:
    env: HermesAgentBaseEnv
    items: Sequence[Any]
    kinds: dict[str, str]

    async def run(self, step: int, path: Path, progress: Progress) -> dict[str, Any]:
        """Roll out, store the records, and sum up; `progress` is called for each finished task."""
        began, done = time.monotonic(), 0

        def on_group(_group: GroupResult) -> None:
            nonlocal done
            done += 1
            progress(done, len(self.items))

        records = await evaluation_rollouts(self.env, self.items, f"eval{step}", on_group)
        await asyncio.to_thread(store_records, path, records)
        figures = evaluation_figures(records, self.kinds)
        return {"event": "evaluation", "step": step, **figures, "duration_s": time.monotonic() - began}


@asynccontextmanager
async def open_evaluator(
    kind: type[HermesAgentBaseEnv], config: LearnRunConfig, server: ServerConfig
) -> AsyncIterator[Evaluator]:
    """An environment and a pool of its own, apart from those that train."""
    samples = config.learn.eval_samples or config.env.eval_samples
    settings = config.env.model_copy(
        update={
            "eval_items": config.learn.eval_items or config.env.eval_items,
            "eval_samples": samples,
            "max_eval_workers": GROUPS_AT_ONCE * samples,
            "extra_body": {**(config.env.extra_body or {}), GROUP: samples},
        }
    )
    env = kind(settings, [server])
    async with Rollouts(env, mode="evaluate"):
        items = await env.chosen_evaluation_items()
        kinds = {env.item_id(item): str(item_field(item, "kind") or env.category(item) or "all") for item in items}
        yield Evaluator(env, items, kinds)
