"""Scripted attempts at an item, and verification of what they leave as often as one likes: no model is asked.

`validate` plays solutions and saboteurs, `rescore` brings back workspaces of stored rollouts; both verify through
`verified`, which keeps the rules of a rollout: what is missing or does not end is the agent's fault (0), a fault of a
slot is tried again and then raised, and an error of the reward code is an error.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent_loop.local_models.standin.solver import Step
from agent_loop.model.contract import Message
from agent_loop.outcome import Outcome
from agent_loop.records.record import AgentResult, TurnRecord
from agent_loop.turn.runtime import ToolRuntime
from agent_loop.turn.tool_call import ToolCallRecord, ToolStatus
from environments.rollouts.planning import RolloutJob, plan_group
from environments.rollouts.rollout import VERIFY_TRIES, Score, as_score
from environments.rollouts.rollouts import prepared
from environments.sandboxes import Pool, Sandbox
from environments.scoring.contexts import FrozenWorkspace, RolloutScope, SandboxContext, ToolContext, drop_if_there
from environments.scoring.verification import AgentFault, CheckTimeout
from sandbox_pool.errors import SandboxDestroyed, SandboxError, SandboxFileError
from sandbox_pool.results import ExecResult

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Script:
    """What an attempt does."""

    steps: Sequence[Step] = ()
    """Commands and calls, and what is said."""
    stdin: str = ""
    """Given to every command."""
    survey: str = ""
    """A command run before and after; its two outputs are kept."""


@dataclass(frozen=True)
class Attempt:
    """How a script ended."""

    result: AgentResult
    """As if a model had called `terminal` for each command, and the tools for each call. What it says last is the last
    text of the script; without one, what the last command printed."""
    frozen: FrozenWorkspace | None
    """None when the script left nothing to judge."""
    scope: RolloutScope
    """With the state that the environment's own tools left."""
    surveys: tuple[str, ...] = ()
    failed: str = ""
    """The first command that did not exit with 0."""


@dataclass
class Trials:
    """Attempts at items of one environment whose pool is open."""

    env: HermesAgentBaseEnv
    name: str
    """Of these trials, in the names of their leases."""
    _count: int = field(default=0, init=False)

    def _task_id(self, what: str) -> str:
        self._count += 1
        return f"{self.name}-{self._count}/{what}"

    @asynccontextmanager
    async def prepared(self, item: Any) -> AsyncIterator[str]:
        """The state that every attempt at the item starts from, as a snapshot."""

        async def prepare(sandbox: Sandbox) -> None:
            ctx = SandboxContext(sandbox)
            for path, data in self.env.files(item).items():
                await ctx.write_file(path, data)
            await self.env.prepare(item, ctx)

        env, pool = self.env, opened_pool(self.env)
        start = await prepared(pool, self._task_id("prepare"), env.spec(item), prepare, env.config.rollout_tries)
        try:
            yield start.snapshot
        finally:
            await drop_if_there(pool, start.snapshot)

    @asynccontextmanager
    async def attempted(self, item: Any, start: str, script: Script) -> AsyncIterator[Attempt]:
        """Play a script from the prepared state; what it leaves stays frozen until the block ends."""
        pool, config = opened_pool(self.env), self.env.config
        task_id = self._task_id("attempt")
        plan = plan_group(self.env, item, task_id, 0)
        job = plan.for_rollout(task_id, plan.sampling)
        played = _Played(list(job.messages))
        surveys: list[str] = []
        frozen = None
        async with pool.lease_from(start, task_id) as sandbox:
            ctx = SandboxContext(sandbox, scope=job.scope)
            await self.env.start(item, ctx)
            if script.survey:
                surveys.append((await ctx.exec(script.survey)).output)
            try:
                await self._play(job, sandbox, script, played)
                if script.survey:
                    surveys.append((await ctx.exec(script.survey)).output)
                frozen = await FrozenWorkspace.take(sandbox, pool, config.verification == "layer")
            except (AgentFault, SandboxDestroyed, SandboxFileError) as error:
                played.failed = played.failed or str(error)
        try:
            yield Attempt(played.result(), frozen, job.scope, tuple(surveys), played.failed)
        finally:
            if frozen is not None:
                await frozen.close()

    async def _play(self, job: RolloutJob, sandbox: Sandbox, script: Script, played: _Played) -> None:
        """Do what the script says; the tools are made when the first call wants them."""
        ctx = SandboxContext(sandbox, scope=job.scope)
        async with AsyncExitStack() as stack:
            tools: ToolRuntime | None = None
            for step in script.steps:
                if isinstance(step, str):
                    timeout_s = self.env.config.terminal_timeout
                    ran = await ctx.exec(step, timeout_s=timeout_s, stdin=script.stdin or None, may_time_out=True)
                    played.ran(step, ran)
                elif "content" in step:
                    played.said(played.printed if step["content"] is None else str(step["content"]))
                else:
                    if tools is None:
                        tools = await stack.enter_async_context(job.runtime(sandbox))
                    await played.called(tools, step.get("calls", [step]))

    async def verified(
        self,
        item: Any,
        result: AgentResult,
        frozen: FrozenWorkspace | None,
        start: str | None = None,
        scope: RolloutScope | None = None,
    ) -> Score:
        """The score of a frozen workspace; SandboxError when slots fail again and again.

        `start` is a snapshot to judge instead, for rollouts that had no tools and so no workspace.
        """
        start = start if frozen is None else frozen.start
        if start is None:
            return Score(0.0)
        pool = opened_pool(self.env)
        for left in reversed(range(VERIFY_TRIES)):
            task_id = self._task_id("verify")
            scope = scope or RolloutScope(item)
            context = ToolContext(
                pool.lease_from(start, task_id), frozen, task_id, self.env.verifier_paths, scope=scope
            )
            try:
                return as_score(await self.env.compute_reward(item, result, context))
            except (SandboxFileError, CheckTimeout, AgentFault, SandboxDestroyed):
                return Score(0.0)
            except SandboxError as error:
                if not left:
                    raise
                log.warning("%s is tried again: %s", task_id, error)
            finally:
                await context.close()
        raise AssertionError("there is at least one try")


def opened_pool(env: HermesAgentBaseEnv) -> Pool:
    """The environment's pool; RuntimeError before it is open."""
    if env.pool is None:
        raise RuntimeError("the environment has no pool")
    return env.pool


@dataclass
class _Played:
    """A trajectory as it grows."""

    messages: list[Message]
    turns: list[TurnRecord] = field(default_factory=list)
    calls: list[ToolCallRecord] = field(default_factory=list)
    printed: str = ""
    """By the last command."""
    failed: str = ""
    """The first step that went wrong."""

    def ran(self, command: str, ran: ExecResult) -> None:
        """A command, as the call of `terminal` that it stands for."""
        call = ToolCallRecord("terminal", arguments={"command": command}, status=ToolStatus.OK, text=ran.output)
        self._turn([call])
        self.printed = ran.output.strip()
        if ran.exit_code:
            self.failed = self.failed or f"`{command[:200]}` exits {ran.exit_code}"

    async def called(self, tools: ToolRuntime, wanted: Sequence[Mapping[str, Any]]) -> None:
        """Calls of one turn."""
        calls = []
        for one in wanted:
            name, arguments = str(one["name"]), dict(one.get("arguments", {}))
            call = ToolCallRecord(name, arguments, arguments=arguments, schema_valid=True)
            call.finish(await tools.call(name, arguments, call_id=""))
            calls.append(call)
            if call.error:
                self.failed = self.failed or f"{name}: {call.error}"
        self._turn(calls)

    def said(self, text: str) -> None:
        """A turn without calls."""
        self.turns.append(TurnRecord(len(self.turns) + 1, 0.0, message=len(self.messages)))
        self.messages.append({"role": "assistant", "content": text})

    def _turn(self, calls: Sequence[ToolCallRecord]) -> None:
        self.turns.append(TurnRecord(len(self.turns) + 1, 0.0, tool_calls=len(calls), message=len(self.messages)))
        for call in calls:
            call.turn, call.call_id = len(self.turns), f"call_{len(self.calls)}"
            self.calls.append(call)
        asked = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
        self.messages.append({"role": "assistant", "content": "", "tool_calls": asked})
        self.messages += [{"role": "tool", "tool_call_id": call.call_id, "content": call.text} for call in calls]

    def result(self) -> AgentResult:
        """The trajectory as a rollout's."""
        if not self.turns or self.turns[-1].tool_calls:
            self.said(self.printed)
        return AgentResult(
            self.messages,
            turns_used=len(self.turns),
            outcome=Outcome.FINISHED,
            finished_naturally=True,
            turns=self.turns,
            tool_calls=self.calls,
        )
