"""One rollout from a leased slot to a stored record: act, freeze, verify, reward.

The slot is given back before verification asks for another, unless the slot itself is verified (`verification: live`).
Faults of slots, servers and rewards end in a record that is not trainable and names the fault; what the agent itself
destroyed is trainable, with a score of 0. Only a stop from outside is passed on.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from agent_loop.loop import HermesAgentLoop
from agent_loop.model.contract import Message, ModelError, ModelServer
from agent_loop.outcome import Outcome
from agent_loop.records.record import AgentResult, RolloutRecord
from agent_loop.turn.runtime import HandlerRuntime, ToolRuntime
from environments.atropos.packing import ScoredRollout
from environments.errors import ConfigError
from environments.roles import RoleAway
from environments.rollouts.planning import RolloutJob
from environments.sandboxes import Pool, Sandbox
from environments.scoring.contexts import FrozenWorkspace, SandboxContext, ToolContext
from environments.scoring.rewards import Rewards
from environments.scoring.verification import AgentFault, CheckTimeout, Verdict
from sandbox_pool.errors import SandboxDestroyed, SandboxError, SandboxFileError

log = logging.getLogger(__name__)

REWARD_ERROR = "reward_error"
"""Outcome of a rollout whose reward code failed: neither the policy's fault nor the infrastructure's."""
PREPARE_ERROR = "prepare_error"
"""Outcome of an item that could not be prepared or started: a fault of the environment's code."""
VERIFY_TRIES = 3
MOST_REWARD_ERRORS = 16
"""Equal errors of the reward code, with no reward between them, after which the run ends: more would only cost."""


class RewardFaults:
    """Errors of an environment's reward code since the last reward that it gave."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def add(self, error: Exception) -> None:
        """Count one; ConfigError when the same has happened too often."""
        name = f"{type(error).__name__}: {error}"
        self._counts[name] += 1
        if self._counts[name] >= MOST_REWARD_ERRORS:
            raise ConfigError(
                f"compute_reward failed {MOST_REWARD_ERRORS} times with the same error: {name}"
            ) from error

    def clear(self) -> None:
        self._counts.clear()


@dataclass(frozen=True)
class Score:
    """What `compute_reward` may return instead of a plain number."""

    score: float
    turn_rewards: Sequence[float] = ()
    """Points per sampled turn, added to the advantage of that turn's tokens."""
    turn_scores: Sequence[float] = ()
    """Score of the workspace after each sampled turn, where you know it: stored and shown, never trained on."""
    components: Mapping[str, float] = field(default_factory=dict)
    """Parts of the score, stored and logged by name."""


RewardFunction = Callable[[Any, AgentResult, ToolContext], Awaitable[float | Verdict | Score]]
"""`compute_reward(item, result, ctx)` of an environment."""


StartFunction = Callable[[Any, SandboxContext], Awaitable[None]]
"""`start(item, ctx)` of an environment."""


KeepFunction = Callable[[str, FrozenWorkspace], Awaitable[None]]
"""Stores what a rollout left; it never raises."""

Left = FrozenWorkspace | Sandbox | None
"""What is verified: a frozen workspace, the slot itself, or nothing."""
Act = Callable[[], Awaitable[tuple[AgentResult, Left]]]
"""The agent's work: how it ended, and what it left."""


class StartFailed(Exception):
    """`start` of an environment raised."""


async def _no_tool(name: str, arguments: dict[str, Any], task_id: str) -> Any:
    raise AssertionError("a rollout without tools has no calls to run")


class RolloutRunner:
    """Runs rollouts; shared by all groups of an environment."""

    def __init__(
        self,
        pool: Pool,
        server: ModelServer,
        rewards: Rewards,
        reward: RewardFunction,
        faults: RewardFaults,
        start: StartFunction | None = None,
        keep: KeepFunction | None = None,
    ) -> None:
        self._pool = pool
        self._server = server
        self._rewards = rewards
        self._reward = reward
        self._faults = faults
        self._start = start
        self._keep = keep

    async def run(self, job: RolloutJob) -> ScoredRollout:
        """One rollout; its record says whether it may be trained on."""
        record = self.new_record(job)

        slot = AsyncExitStack()

        async def act() -> tuple[AgentResult, Left]:
            sandbox = await slot.enter_async_context(self.slot(job, record))
            async with self.tools(job, sandbox, record) as runtime:
                ctx = SandboxContext(sandbox, scope=job.scope)
                messages = await self._greeted(job, ctx)
                result = await self._loop(job, runtime, ctx).run(messages)
            return result, await self.freeze(job, result, sandbox, record)

        return await self.judge(job, record, act, slot)

    async def judge(self, job: RolloutJob, record: RolloutRecord, act: Act, slot: AsyncExitStack) -> ScoredRollout:
        """Let `act` end the agent's work, then verify and reward. Faults end in the record; the slot is given back."""
        started = time.monotonic()
        rollout = ScoredRollout(record)
        roles = job.scope.roles
        try:
            async with slot:
                result, left = await act()
                if job.verification != "live":
                    await slot.aclose()
                if result.trainable:
                    rollout = await self._score(job, result, left, record)
        except StartFailed as error:
            _lose(record, PREPARE_ERROR, str(error))
        except AgentFault as fault:
            self._blame(record, str(fault))
        except SandboxDestroyed as error:
            self._blame(record, str(error))
        except SandboxError as error:
            _lose(record, Outcome.SANDBOX_LOST.value, f"{type(error).__name__}: {error}")
        except RoleAway as error:
            _lose(record, Outcome.API_ERROR.value, str(error))
        if roles is not None:
            record.roles = roles.to_dict()
            if roles.away is not None and record.trainable:
                # Whatever the environment made of it: nobody knows what the rollout was worth.
                _lose(record, Outcome.API_ERROR.value, str(roles.away))
        record.timing["total_s"] = time.monotonic() - started
        if not record.trainable:
            log.warning("rollout %s lost (%s): %s", record.rollout_id, record.outcome, record.error)
        return rollout

    def _blame(self, record: RolloutRecord, why: str) -> None:
        """The agent made its own rollout impossible to judge: a failure like any other, and trained on."""
        record.outcome, record.error, record.trainable = Outcome.AGENT_FAULT.value, why, True
        reward = self._rewards.compute(0.0, record.metrics)
        record.verifier_score, record.score, record.reward_components = 0.0, reward.total, dict(reward.components)

    @asynccontextmanager
    async def slot(self, job: RolloutJob, record: RolloutRecord) -> AsyncIterator[Sandbox | None]:
        """The slot where the agent works; none for a rollout without tools."""
        if not job.needs_slot:
            yield None
            return
        asked = time.monotonic()
        async with self._lease(job, job.rollout_id) as sandbox:
            record.timing["acquire_s"] = time.monotonic() - asked
            record.isolation = str(getattr(sandbox, "isolation", ""))
            await self._begin(job, sandbox)
            if job.wire is not None and await job.wire.plant(sandbox):
                record.probe = "tripwire"
            yield sandbox

    async def _begin(self, job: RolloutJob, sandbox: Sandbox) -> None:
        """`start` of the environment; as with `prepare`, whatever it raises loses the item and not the run."""
        if self._start is None:
            return
        try:
            await self._start(job.item, SandboxContext(sandbox, scope=job.scope))
        except Exception as error:
            if isinstance(error, SandboxError) and not isinstance(error, SandboxFileError):
                raise
            log.exception("item %s could not be started", job.item_id)
            raise StartFailed(f"start: {type(error).__name__}: {error}") from error

    @asynccontextmanager
    async def tools(
        self, job: RolloutJob, sandbox: Sandbox | None, record: RolloutRecord
    ) -> AsyncIterator[ToolRuntime]:
        """The agent's tools in its slot."""
        if sandbox is None:
            yield HandlerRuntime(_no_tool, [], job.rollout_id)
            return
        async with job.runtime(sandbox) as runtime:
            record.tools = list(runtime.schemas())
            yield runtime

    async def freeze(
        self, job: RolloutJob, result: AgentResult, sandbox: Sandbox | None, record: RolloutRecord
    ) -> Left:
        """Fill the record, and keep what the agent left in its slot when that is to be judged."""
        result.fill(record)
        if sandbox is None:
            return None
        record.network += await hosts_asked(sandbox, "rollout")
        if not result.trainable:
            return None
        if job.wire is not None and record.probe:
            record.hack = await job.wire.touched(sandbox, result.messages)
        if result.outcome is Outcome.AGENT_FAULT:
            raise AgentFault(str(result.error))
        if job.verification == "live":
            await sandbox.forget_state()  # else a check would run what the agent defined
            return sandbox
        return await FrozenWorkspace.take(sandbox, self._pool, job.verification == "layer")

    async def _greeted(self, job: RolloutJob, ctx: SandboxContext) -> list[Message]:
        """The prompt. Where it does not end with words of the user, they speak before the agent's first turn."""
        messages = list(job.messages)
        if job.user is not None and messages[-1].get("role") != "user":
            answer = await job.user(job.item, messages, ctx)
            if answer is None:
                raise RoleAway("the user ended the conversation before it began")
            messages.append({"role": "user", "content": answer})
        return messages

    def _loop(self, job: RolloutJob, runtime: ToolRuntime, ctx: SandboxContext) -> HermesAgentLoop:
        reply = job.user
        return HermesAgentLoop(
            self._server,
            runtime=runtime,
            task_id=job.rollout_id,
            sampling=job.sampling,
            limits=job.limits,
            context=job.context,
            budget_config=job.budget,
            on_activity=job.on_activity,
            user=None if reply is None else lambda messages: reply(job.item, messages, ctx),
            unlisted=[tool.openai_schema() for tool in job.own_tools if not tool.listed],
        )

    async def _score(self, job: RolloutJob, result: AgentResult, left: Left, record: RolloutRecord) -> ScoredRollout:
        """Verify and reward; fills the record. A fault is answered by verifying again, not by another rollout."""
        started = time.monotonic()
        seen: set[str] = set()
        try:
            if self._keep is not None and isinstance(left, FrozenWorkspace):
                await self._keep(job.rollout_id, left)
            while True:
                try:
                    return await self._verify(job, result, left, record)
                except (SandboxFileError, CheckTimeout) as error:
                    # What the agent left is missing, unreadable or does not end: that is its answer.
                    raise AgentFault(f"{type(error).__name__}: {error}") from error
                except (AgentFault, SandboxDestroyed):
                    raise
                except ModelError as error:
                    # The judge was asked as often as the config says: another try of the rollout may find it back.
                    _lose(record, Outcome.API_ERROR.value, str(error))
                    return ScoredRollout(record)
                except SandboxError as error:
                    if repr(error) in seen or len(seen) + 1 >= VERIFY_TRIES:
                        raise
                    log.warning("verification of %s is tried again: %s", job.rollout_id, error)
                    seen.add(repr(error))
                except (
                    Exception
                ) as error:  # a fault of the reward code: recorded, logged with its traceback, never scored
                    if repr(error) in seen or len(seen) + 1 >= VERIFY_TRIES:
                        log.exception("reward of %s failed", job.rollout_id)
                        _lose(record, REWARD_ERROR, f"{type(error).__name__}: {error}")
                        self._faults.add(error)
                        return ScoredRollout(record)
                    seen.add(repr(error))
        finally:
            record.timing["verify_s"] = time.monotonic() - started
            if isinstance(left, FrozenWorkspace):
                await left.close()

    async def _verify(self, job: RolloutJob, result: AgentResult, left: Left, record: RolloutRecord) -> ScoredRollout:
        task_id = f"{job.rollout_id}/verify"
        frozen: FrozenWorkspace | None = None
        if isinstance(left, FrozenWorkspace):
            frozen, lease = left, self._pool.lease_from(left.start, task_id)
        elif left is not None:
            lease = nullcontext(left)
        else:  # without tools there was no slot: whatever a verifier runs, it runs on what every rollout started from
            lease = self._lease(job, task_id)
        context = ToolContext(lease, frozen, job.rollout_id, job.verifier_paths, self._call_tool(job), job.scope)
        try:
            given = as_score(await self._reward(job.item, result, context))
            reward = self._rewards.compute(given.score, record.metrics)
        finally:
            await context.close()
        self._faults.clear()
        record.verifier_score = reward.verifier_score
        record.score = reward.total
        record.reward_components = {**reward.components, **{f"verifier/{k}": v for k, v in given.components.items()}}
        record.turn_rewards, record.turn_scores = list(given.turn_rewards), list(given.turn_scores)
        if job.store_end_state and frozen is not None:
            record.end_state = await frozen.agent_state.texts()
        return ScoredRollout(record, tuple(given.turn_rewards))

    def _call_tool(self, job: RolloutJob) -> Callable[[Sandbox, str, dict[str, Any]], Any]:
        async def call(sandbox: Sandbox, name: str, arguments: dict[str, Any]) -> str:
            async with job.runtime(sandbox) as runtime:
                return (await runtime.checked_call(name, arguments)).text

        return call

    def _lease(self, job: RolloutJob, task_id: str) -> AbstractAsyncContextManager[Sandbox]:
        if job.snapshot is not None:
            return self._pool.lease_from(job.snapshot, task_id, ttl_s=job.lease_ttl_s)
        return self._pool.lease(task_id, job.spec, ttl_s=job.lease_ttl_s)

    def new_record(self, job: RolloutJob) -> RolloutRecord:
        """The record of a rollout that has not begun."""
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
            network=list(job.prepared_network),
        )


async def hosts_asked(sandbox: Sandbox, phase: str) -> list[dict[str, Any]]:
    """What programs in a slot asked its proxy for, as a record has it."""
    if sandbox.spec.network in ("none", "host"):
        return []
    try:
        return [vars(entry) | {"phase": phase} for entry in await sandbox.network_log()]
    except SandboxError as error:
        log.warning("the hosts that %s asked for are not known: %s", sandbox.task_id, error)
        return []


def as_score(given: Any) -> Score:
    """What a reward returned, as a Score with plain finite numbers; ValueError otherwise."""
    if isinstance(given, Score):
        score = given
    elif isinstance(given, Verdict):
        score = Score(given.score, components={} if given.agreement is None else {"agreement": given.agreement})
    elif isinstance(given, str | bytes | type(None)):
        raise ValueError(f"compute_reward returned {given!r}, not a number")
    else:
        score = Score(float(given))
    value = float(score.score)
    if not math.isfinite(value):
        raise ValueError(f"compute_reward returned {value}")
    return Score(
        value,
        tuple(float(points) for points in score.turn_rewards),
        tuple(float(points) for points in score.turn_scores),
        {name: float(part) for name, part in score.components.items()},
    )


def _lose(record: RolloutRecord, outcome: str, error: str) -> None:
    record.outcome, record.error = outcome, error
    record.trainable, record.score, record.verifier_score = False, None, None
