"""One rollout from a leased slot to a stored record: act, freeze, verify, reward.

The slot is given back before verification asks for another. Faults of slots, servers and rewards end in a record that
is not trainable and names the fault; only a stop from outside is passed on.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

from agent_loop.loop import HermesAgentLoop
from agent_loop.model.contract import ModelServer
from agent_loop.outcome import Outcome
from agent_loop.records.record import AgentResult, RolloutRecord
from agent_loop.tools import SandboxTools
from environments.atropos.packing import ScoredRollout
from environments.rollouts.planning import RolloutJob
from environments.sandboxes import Pool, Sandbox
from environments.scoring.contexts import FrozenWorkspace, ToolContext
from environments.scoring.rewards import Rewards
from environments.scoring.verification import Verdict
from sandbox_pool.errors import SandboxError

log = logging.getLogger(__name__)

REWARD_ERROR = "reward_error"
"""Outcome of a rollout whose reward could not be computed: not the policy's fault."""


@dataclass(frozen=True)
class Score:
    """What `compute_reward` may return instead of a plain number."""

    score: float
    turn_rewards: Sequence[float] = ()
    """Points per sampled turn, added to the advantage of that turn's tokens."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the score, stored and logged by name."""


RewardFunction = Callable[[Any, AgentResult, ToolContext], Awaitable[float | Verdict | Score]]
"""`compute_reward(item, result, ctx)` of an environment."""


class RolloutRunner:
    """Runs rollouts; shared by all groups of an environment."""

    def __init__(self, pool: Pool, server: ModelServer, rewards: Rewards, reward: RewardFunction) -> None:
        self._pool = pool
        self._server = server
        self._rewards = rewards
        self._reward = reward

    async def run(self, job: RolloutJob) -> ScoredRollout:
        """One rollout; its record says whether it may be trained on."""
        record = self._new_record(job)
        started = time.monotonic()
        rollout = ScoredRollout(record)
        try:
            result, frozen = await self._act(job, record)
            if frozen is not None:
                rollout = await self._score(job, result, frozen, record)
        except SandboxError as error:
            _lose(record, Outcome.SANDBOX_LOST.value, f"{type(error).__name__}: {error}")
            rollout = ScoredRollout(record)
        record.timing["total_s"] = time.monotonic() - started
        if not record.trainable:
            log.warning("rollout %s lost (%s): %s", record.rollout_id, record.outcome, record.error)
        return rollout

    async def _act(self, job: RolloutJob, record: RolloutRecord) -> tuple[AgentResult, FrozenWorkspace | None]:
        """Let the agent work in its slot; fills the record. The slot is given back on return."""
        asked = time.monotonic()
        async with self._lease(job) as sandbox:
            record.timing["acquire_s"] = time.monotonic() - asked
            record.isolation = str(getattr(sandbox, "isolation", ""))
            async with job.runtime(sandbox) as runtime:
                record.tools = list(runtime.schemas())
                result = await self._loop(job, runtime).run(list(job.messages))
            result.fill(record)
            if not result.trainable:
                return result, None
            return result, await FrozenWorkspace.take(sandbox, job.whole_layer)

    def _loop(self, job: RolloutJob, runtime: SandboxTools) -> HermesAgentLoop:
        return HermesAgentLoop(
            self._server,
            runtime=runtime,
            task_id=job.rollout_id,
            sampling=job.sampling,
            limits=job.limits,
            context=job.context,
            budget_config=job.budget,
            on_activity=job.on_activity,
        )

    async def _score(
        self, job: RolloutJob, result: AgentResult, frozen: FrozenWorkspace, record: RolloutRecord
    ) -> ScoredRollout:
        """Verify and reward; fills the record. A reward that fails makes the rollout untrainable, never a 0."""
        started = time.monotonic()
        context = ToolContext(frozen, self._pool, job.spec, job.rollout_id, job.verifier_paths, self._call_tool(job))
        try:
            given = as_score(await self._reward(job.item, result, context))
            reward = self._rewards.compute(given.score, record.metrics)
        except SandboxError:
            raise
        except Exception as error:  # a fault of the reward code: recorded, logged with its traceback, never scored
            log.exception("reward of %s failed", job.rollout_id)
            _lose(record, REWARD_ERROR, f"{type(error).__name__}: {error}")
            return ScoredRollout(record)
        finally:
            await context.close()
        record.verifier_score = reward.verifier_score
        record.score = reward.total
        record.reward_components = {**reward.components, **{f"verifier/{k}": v for k, v in given.components.items()}}
        record.timing["verify_s"] = time.monotonic() - started
        return ScoredRollout(record, tuple(float(value) for value in given.turn_rewards))

    def _call_tool(self, job: RolloutJob) -> Callable[[Sandbox, str, dict[str, Any]], Any]:
        async def call(sandbox: Sandbox, name: str, arguments: dict[str, Any]) -> str:
            async with job.runtime(sandbox) as runtime:
                return (await runtime.checked_call(name, arguments)).text

        return call

    def _lease(self, job: RolloutJob) -> AbstractAsyncContextManager[Sandbox]:
        if job.snapshot is not None:
            return self._pool.lease_from(job.snapshot, job.rollout_id, ttl_s=job.lease_ttl_s)
        return self._pool.lease(job.rollout_id, job.spec, ttl_s=job.lease_ttl_s)

    def _new_record(self, job: RolloutJob) -> RolloutRecord:
        return RolloutRecord(
            rollout_id=job.rollout_id,
            group_id=job.group_id,
            environment=job.environment,
            item_id=job.item_id,
            category=job.category,
            policy=job.policy,
            seed=job.sampling.seed,
            outcome=Outcome.CANCELLED.value,
            trainable=False,
            messages=list(job.messages),
        )


def as_score(given: Any) -> Score:
    """What a reward returned, as a Score with plain finite numbers; ValueError otherwise."""
    if isinstance(given, Score):
        score = given
    elif isinstance(given, Verdict):
        score = Score(given.score)
    elif isinstance(given, str | bytes | type(None)):
        raise ValueError(f"compute_reward returned {given!r}, not a number")
    else:
        score = Score(float(given))
    value = float(score.score)
    if not math.isfinite(value):
        raise ValueError(f"compute_reward returned {value}")
    return Score(value, tuple(score.turn_rewards), {name: float(part) for name, part in score.components.items()})


def _lose(record: RolloutRecord, outcome: str, error: str) -> None:
    record.outcome, record.error = outcome, error
    record.trainable, record.score, record.verifier_score = False, None, None
