"""Rewards of a stored run once more: the workspaces of its rollouts are brought back and only `compute_reward` runs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from agent_loop.outcome import Outcome
from agent_loop.records.metrics import rollout_metrics
from agent_loop.records.record import AgentResult, RolloutRecord
from environments.base import HermesAgentBaseEnv
from environments.config.settings import WorkspaceSettings
from environments.errors import UsageError
from environments.rollouts.rollout import REWARD_ERROR, Score
from environments.rollouts.trials import Trials, opened_pool
from environments.rollouts.workspaces import KeptWorkspaces
from environments.runs.progress import Progress, Tally
from environments.runs.store import whole_lines
from environments.scoring.contexts import FrozenWorkspace
from environments.scoring.rewards import Rewards
from sandbox_pool.errors import SandboxError

log = logging.getLogger(__name__)

ANY_SIZE = WorkspaceSettings(max_mb=1 << 14, total_mb=1 << 30)


@dataclass(frozen=True)
class Rescored:
    """A run with new scores."""

    records: tuple[RolloutRecord, ...]
    """All of them; what could not be scored again keeps its old score."""
    scored: int
    skipped: Mapping[str, int]
    """Why rollouts kept their old score, and how many."""


@dataclass
class _Rescoring(Tally):
    def line(self) -> str:
        return f"{self.done}/{self.total} rollouts scored again, {self.per_minute:.0f}/min"


def stored_run(run: Path) -> dict[str, Any]:
    """What the run was made with; UsageError when `process` or `evaluate` did not write it."""
    try:
        stored = orjson.loads((run / "config.json").read_bytes())
        stored["env"].get("limits", {}).pop("max_turns", None)  # that is env.max_agent_turns
        return {"verb": stored["verb"], "environment": stored["class"], "env": stored["env"]}
    except (OSError, KeyError, TypeError, AttributeError, orjson.JSONDecodeError) as error:
        raise UsageError(
            f"{run} is not a run of process or evaluate: its config.json cannot be read: {error}"
        ) from error


async def rescore(
    env: HermesAgentBaseEnv, run: Path, verb: str, records: Sequence[RolloutRecord], progress: Progress
) -> Rescored:
    """Score every rollout whose workspace was kept again, with this environment; its pool is open."""
    await env.setup()
    items = await _items(env, run, verb, {record.item_id for record in records})
    kept = KeptWorkspaces(run / "workspaces", ANY_SIZE)
    rewards = Rewards(env.config.rewards, tuple(rollout_metrics([], [], Outcome.FINISHED)))
    tally, skipped = _Rescoring(len(records)), dict[str, int]()
    at_once = asyncio.Semaphore(env.config.groups_at_once)

    async def one(record: RolloutRecord) -> RolloutRecord:
        async with at_once:
            why = _why_not(record, items, kept)
            new = record
            if not why:
                try:
                    new = await _again(env, items[record.item_id], record, kept, rewards)
                except SandboxError as error:
                    why = f"slots failed: {type(error).__name__}"
            if why:
                skipped[why] = skipped.get(why, 0) + 1
            tally.done += 1
            progress.show(tally)
            return new

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(record)) for record in records]
    return Rescored(tuple(task.result() for task in tasks), len(records) - sum(skipped.values()), skipped)


def _why_not(record: RolloutRecord, items: Mapping[str, Any], kept: KeptWorkspaces) -> str:
    if not record.trainable and record.outcome != REWARD_ERROR:
        return "lost to infrastructure"
    if record.outcome == Outcome.AGENT_FAULT.value:
        return "the agent left nothing to judge"
    if record.item_id not in items:
        return "the environment no longer has the item"
    return "" if not record.tools or kept.has(record.rollout_id) else "no workspace was kept"


async def _items(env: HermesAgentBaseEnv, run: Path, verb: str, wanted: set[str]) -> dict[str, Any]:
    """The items of the run by id, asked for as the run did."""
    if verb == "evaluate":
        return {env.item_id(item): item for item in await env.evaluation_items()}
    last = max((int(entry["index"]) for entry in whole_lines(run / "groups.jsonl")), default=-1)
    items: dict[str, Any] = {}
    for _ in range(last + 1):
        if wanted <= items.keys() or (item := await env.next_item()) is None:
            break
        items[env.item_id(item)] = item
    return items


async def _again(
    env: HermesAgentBaseEnv, item: Any, record: RolloutRecord, kept: KeptWorkspaces, rewards: Rewards
) -> RolloutRecord:
    trials, result = Trials(env, f"rescore-{record.rollout_id}"), AgentResult.from_record(record)
    changes: dict[str, Any] = {"trainable": True, "error": None}
    if record.outcome == REWARD_ERROR:
        changes["outcome"] = Outcome.FINISHED.value
    try:
        async with _workspace(env, item, record, kept, trials) as (frozen, start):
            given = await trials.verified(item, result, frozen, start)
    except SandboxError:
        raise
    except UsageError:
        raise
    except Exception as error:
        log.exception("reward of %s failed", record.rollout_id)
        changes = {"outcome": REWARD_ERROR, "trainable": False, "error": f"{type(error).__name__}: {error}"}
        return dataclasses.replace(record, **changes, score=None, verifier_score=None)
    return dataclasses.replace(record, **changes, **_scores(given, rewards, record))


def _scores(given: Score, rewards: Rewards, record: RolloutRecord) -> dict[str, Any]:
    reward = rewards.compute(given.score, record.metrics)
    parts = {f"verifier/{name}": value for name, value in given.components.items()}
    return {
        "score": reward.total,
        "verifier_score": reward.verifier_score,
        "reward_components": {**reward.components, **parts},
    }


@asynccontextmanager
async def _workspace(
    env: HermesAgentBaseEnv, item: Any, record: RolloutRecord, kept: KeptWorkspaces, trials: Trials
) -> AsyncIterator[tuple[FrozenWorkspace | None, str | None]]:
    """What the rollout left; a rollout without tools left nothing, and is judged in the prepared state."""
    if not record.tools:
        async with trials.prepared(item) as start:
            yield None, start
        return
    layer = env.config.verification == "layer"
    frozen = await kept.restored(record.rollout_id, opened_pool(env), env.spec(item), layer)
    try:
        yield frozen, None
    finally:
        await frozen.close()


def changed(old: Iterable[RolloutRecord], new: Iterable[RolloutRecord]) -> list[tuple[RolloutRecord, RolloutRecord]]:
    """Rollouts whose verifier score is another now."""
    return [(a, b) for a, b in zip(old, new, strict=True) if a.verifier_score != b.verifier_score]
