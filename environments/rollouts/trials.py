"""Scripted attempts at an item, and verification of what they leave as often as one likes: no model is asked.

`validate` plays solutions and saboteurs, `rescore` brings back workspaces of stored rollouts; both verify through
`verified`, which keeps the rules of a rollout: what is missing or does not end is the agent's fault (0), a fault of a
slot is tried again and then raised, and an error of the reward code is an error.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agent_loop.model.contract import Message
from agent_loop.outcome import Outcome
from agent_loop.records.record import AgentResult, TurnRecord
from environments.rollouts.planning import first_messages
from environments.rollouts.rollout import VERIFY_TRIES, Score, as_score
from environments.rollouts.rollouts import prepared
from environments.sandboxes import Pool, Sandbox
from environments.scoring.contexts import FrozenWorkspace, SandboxContext, ToolContext, drop_if_there
from environments.scoring.verification import AgentFault, CheckTimeout
from sandbox_pool.errors import SandboxDestroyed, SandboxError, SandboxFileError

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Script:
    """What an attempt runs in its slot."""

    commands: Sequence[str] = ()
    stdin: str = ""
    """Given to every command."""
    survey: str = ""
    """A command run before and after; its two outputs are kept."""


@dataclass(frozen=True)
class Attempt:
    """How a script ended."""

    result: AgentResult
    """As if a model had called `terminal` for each command and then said what the last one printed."""
    frozen: FrozenWorkspace | None
    """None when the script left nothing to judge."""
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
        steps: list[tuple[str, str]] = []
        surveys: list[str] = []
        failed, frozen = "", None
        async with pool.lease_from(start, self._task_id("attempt")) as sandbox:
            ctx = SandboxContext(sandbox)
            await self.env.start(item, ctx)
            if script.survey:
                surveys.append((await ctx.exec(script.survey)).output)
            try:
                for command in script.commands:
                    ran = await ctx.exec(
                        command, timeout_s=config.terminal_timeout, stdin=script.stdin or None, may_time_out=True
                    )
                    steps.append((command, ran.output))
                    failed = failed or (f"`{command[:200]}` exits {ran.exit_code}" if ran.exit_code else "")
                if script.survey:
                    surveys.append((await ctx.exec(script.survey)).output)
                frozen = await FrozenWorkspace.take(sandbox, pool, config.verification == "layer")
            except (AgentFault, SandboxDestroyed, SandboxFileError) as error:
                failed = failed or str(error)
        try:
            prompt = first_messages(config, self.env.format_prompt(item))
            yield Attempt(_result(prompt, steps), frozen, tuple(surveys), failed)
        finally:
            if frozen is not None:
                await frozen.close()

    async def verified(
        self, item: Any, result: AgentResult, frozen: FrozenWorkspace | None, start: str | None = None
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
            context = ToolContext(pool.lease_from(start, task_id), frozen, task_id, self.env.verifier_paths)
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


def _result(prompt: Sequence[Message], steps: Sequence[tuple[str, str]]) -> AgentResult:
    messages: list[Message] = list(prompt)
    turns = []
    for number, (command, output) in enumerate(steps):
        call = {"id": f"call_{number}", "type": "function"}
        call["function"] = {"name": "terminal", "arguments": {"command": command}}  # type: ignore[assignment]
        turns.append(TurnRecord(number + 1, 0.0, tool_calls=1, message=len(messages)))
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})
    turns.append(TurnRecord(len(steps) + 1, 0.0, message=len(messages)))
    messages.append({"role": "assistant", "content": steps[-1][1].strip() if steps else ""})
    return AgentResult(messages, turns_used=len(turns), outcome=Outcome.FINISHED, finished_naturally=True, turns=turns)
