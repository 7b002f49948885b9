"""`ToolSession`: the tools, the slot and the reward of one rollout, for trainers that sample by themselves.

The slot, the tools with their limits and budgets, and the verification in a fork are those of `Rollouts`; only the
turns come from elsewhere, and with them the tokens: what is exact there is the trainer's to prove.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from agent_loop.model.contract import Message, ModelTurn, ToolSchema
from agent_loop.outcome import Outcome
from agent_loop.records.metrics import rollout_metrics
from agent_loop.records.record import AgentResult, RolloutRecord, TurnRecord
from agent_loop.turn.calls import CallPlanner, ToolTurns
from agent_loop.turn.messages import CallIds, assistant_message, settle
from agent_loop.turn.tool_call import ToolCallRecord
from environments.errors import RolloutLost
from environments.rollouts.planning import RolloutJob
from environments.rollouts.rollout import Left
from environments.rollouts.rollouts import GroupResult, Rollouts
from environments.sandboxes import Sandbox
from sandbox_pool.errors import SandboxLost


class NoModel:
    """Stands where an environment has its model, for rollouts whose turns come from elsewhere."""

    def open(self, messages: Any, tools: Any) -> Any:
        raise AssertionError("the turns of these rollouts come from elsewhere")

    def count_tokens(self, messages: Any, tools: Any) -> int | None:
        raise AssertionError("the turns of these rollouts come from elsewhere")


class ToolSession:
    """One rollout whose turns somebody else samples.

        session = ToolSession(rollouts)
        messages = await session.open(item)                  # sample from these, with session.schemas()
        text = await session.call("terminal", {"command": "ls"})
        score = await session.reward()                       # ends the session

    A session can be opened again after `reward` or `close`. Sessions of the same item share what `prepare` made.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        self.record: RolloutRecord | None = None
        """The rollout as it is stored; complete after `reward`."""
        self.messages: list[Message] = []
        """What was said so far, as far as the session knows: each call is a turn of its own."""
        self.ended: Outcome | None = None
        """Which limit, or which fault, has ended the rollout; None while it may go on."""
        self._rollouts = rollouts
        self._runner = rollouts.runner()
        self._place, self._slot, self._tools = AsyncExitStack(), AsyncExitStack(), AsyncExitStack()
        self._opening, self._is_open = asyncio.Lock(), False

    async def __aenter__(self) -> ToolSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self, item: Any) -> list[Message]:
        """Lease a prepared slot; the messages that the conversation starts with."""
        async with self._opening:
            await self.close()
            return await self._open(item)

    async def _open(self, item: Any) -> list[Message]:
        place = self._rollouts.place(item, self._rollouts.env.item_id(item))
        try:
            job, number, _ = await self._place.enter_async_context(place)
            self._job: RolloutJob = job.for_rollout(f"{job.group_id}/{number}", job.sampling)
            self.record = self._runner.new_record(self._job)
            self._sandbox: Sandbox | None
            self._sandbox = await self._slot.enter_async_context(self._runner.slot(self._job, self.record))
            tools = self._runner.tools(self._job, self._sandbox, self.record)
            runtime = await self._tools.enter_async_context(tools)
        except BaseException:
            await self.close()
            raise
        schemas = self.record.tools
        names = [str(tool["function"]["name"]) for tool in schemas]
        self._calls = ToolTurns(runtime, CallPlanner(schemas, names), job.limits, job.budget)
        self._ids = CallIds()
        self._turns: list[TurnRecord] = []
        self.ended = None
        allowed = job.limits.rollout_timeout_s
        self._deadline = None if allowed is None else asyncio.get_running_loop().time() + allowed
        self.messages = list(job.messages)
        self._is_open = True
        return list(job.messages)

    def schemas(self) -> list[ToolSchema]:
        """The tools as OpenAI schemas."""
        return self._opened().tools

    async def call(self, name: str, arguments: Any) -> str:
        """Run one call; what the model is to read, errors included. SandboxLost when the slot went away."""
        self._opened()
        turn = settle(ModelTurn("", (ToolCallRecord(name, arguments),)), self._ids)
        record = TurnRecord(len(self._turns) + 1, 0.0, tool_calls=1)
        self._turns.append(record)
        results: list[Message] = []
        started = time.monotonic()
        try:
            self.ended = await self._calls.run(turn, record, self._deadline, results) or self.ended
        finally:
            record.tools_s, record.message = time.monotonic() - started, len(self.messages)
            self.messages += [assistant_message(turn), *results]  # of calls at once each keeps its own result
        if self.ended is Outcome.SANDBOX_LOST:
            raise SandboxLost(self._calls.lost or "the sandbox was lost")
        return str(results[0]["content"])

    async def reward(self, messages: Sequence[Message] | None = None) -> float:
        """Judge what was left in the slot, and give it back. RolloutLost where infrastructure prevents that.

        `messages` is the whole conversation, for rewards that read it; without it they see the calls alone.
        """
        record = self._opened()
        self._is_open = False  # what is called from here on would change what is judged
        result = self._result(self.messages if messages is None else list(messages))

        async def act() -> tuple[AgentResult, Left]:
            await self._tools.aclose()
            return result, await self._runner.freeze(self._job, result, self._sandbox, record)

        try:
            rollout = await self._runner.judge(self._job, record, act, self._slot)
        finally:
            await self.close()
        score = record.score if record.trainable else None
        stored = GroupResult(record.group_id, record.item_id, 1)
        if score is None:
            stored.lost.append(record)
        else:
            stored.scored.append(rollout)
        env = self._rollouts.env
        env.keep(record)
        await env.save(stored)
        if score is None:
            raise RolloutLost(f"a rollout of {record.item_id}", [record])
        return score

    async def close(self) -> None:
        """Give back the slot without judging what is in it."""
        self._is_open = False
        async with AsyncExitStack() as stack:  # each of them, whatever the others raise
            for part in (self._place, self._slot, self._tools):
                stack.push_async_callback(part.aclose)

    def _opened(self) -> RolloutRecord:
        if self.record is None or not self._is_open:
            raise RuntimeError("the session is not open: call open(item) first")
        return self.record

    def _result(self, messages: list[Message]) -> AgentResult:
        outcome = self.ended or Outcome.FINISHED
        turns = [*self._turns, TurnRecord(len(self._turns) + 1, 0.0)]  # the one that called no tool
        metrics = rollout_metrics(turns, self._calls.records, outcome)
        return AgentResult(
            messages=messages,
            turns_used=len(turns),
            finished_naturally=outcome is Outcome.FINISHED,
            tool_errors=self._calls.errors,
            tool_calls_attempted=int(metrics["tool_calls_attempted"]),
            tool_calls_schema_valid=int(metrics["tool_calls_schema_valid"]),
            tool_calls_executed_ok=int(metrics["tool_calls_executed_ok"]),
            tool_calls_exec_error=int(metrics["tool_calls_exec_error"]),
            outcome=outcome,
            error=self._calls.lost,
            turns=turns,
            tool_calls=self._calls.records,
            metrics=metrics,
            timing={"tools_s": metrics["tools_s"]},
        )
