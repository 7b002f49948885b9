"""One rollout from its first prompt to its outcome. The order of the checks is written down in `limits.py`.

The trajectory only grows, and its calls and results pair whenever somebody else can read it: however a turn ends, each
tool call of the last assistant message has its tool message.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent_loop.context.result_budget import ResultBudget
from agent_loop.context.strategies import CHARS_PER_TOKEN
from agent_loop.context.window import ContextPolicy, ContextWindow
from agent_loop.fairness import wait_in_line
from agent_loop.limits import Limits
from agent_loop.model.contract import ContextTooLong, Message, ModelError, ModelServer, ModelTurn, Sampling, ToolSchema
from agent_loop.model.errors import RetryPolicy, translate, with_retries
from agent_loop.outcome import Outcome
from agent_loop.records.result import TurnRecord
from agent_loop.turn.calls import CallPlanner, ToolTurns, earliest
from agent_loop.turn.messages import CallIds, assistant_message, settle
from agent_loop.turn.runtime import ToolRuntime

log = logging.getLogger(__name__)

BROKEN_OFF = frozenset({"abort", "error"})
"""Finish reasons by which engines say that they gave up on a request."""
MAX_SHRINKS = 3
"""Times one turn's prompt is cut further after the server called it too long."""


@dataclass(frozen=True)
class RolloutConfig:
    """Everything a rollout needs, except its messages."""

    server: ModelServer
    tools: Sequence[ToolSchema]
    valid_names: frozenset[str]
    runtime: ToolRuntime
    sampling: Sampling = field(default_factory=Sampling)
    limits: Limits = field(default_factory=Limits)
    context: ContextPolicy = field(default_factory=ContextPolicy)
    budget: ResultBudget = field(default_factory=ResultBudget)
    retry: RetryPolicy = field(default_factory=RetryPolicy)


class Rollout:
    """The state of one rollout; `drive` runs it to its end."""

    def __init__(self, config: RolloutConfig, messages: list[Message]) -> None:
        self.messages = messages
        self.turns: list[TurnRecord] = []
        self.reasoning: list[str | None] = []
        self.truncations: list[dict[str, Any]] = []
        self.turns_begun = 0
        self.conversation = config.server.open(messages, config.tools)
        planner = CallPlanner(config.tools, config.valid_names)
        self.tools = ToolTurns(config.runtime, planner, config.limits, config.budget)
        self._config = config
        self._limits = config.limits
        self._ids = CallIds()
        self._window = ContextWindow(config.context, config.server, self.conversation, config.tools, messages)
        self._sampled_tokens = 0
        self._unsent: list[Message] = []
        allowed = config.limits.rollout_timeout_s
        self._clock = asyncio.get_running_loop().time
        self._deadline = None if allowed is None else self._clock() + allowed

    async def drive(self) -> Outcome:
        """Take turns until one ends the rollout. Raises `ModelError`, `ContextOverflow` and cancellation."""
        await wait_in_line()
        while True:
            outcome = self._before_turn() or await self._turn()
            if outcome is not None:
                return outcome

    def _before_turn(self) -> Outcome | None:
        if self._past_deadline():
            return Outcome.DEADLINE
        if self.turns_begun >= self._limits.max_turns:
            return Outcome.MAX_TURNS
        budget = self._limits.max_sampled_tokens
        if budget is not None and self._sampled_tokens >= budget:
            return Outcome.MAX_SAMPLED_TOKENS
        return None

    async def _turn(self) -> Outcome | None:
        self.turns_begun += 1
        allowed = self._limits.turn_timeout_s
        deadline = earliest(self._deadline, None if allowed is None else self._clock() + allowed)
        self._extend(self._config.runtime.pending_notices())
        record = TurnRecord(self.turns_begun, 0.0)
        started = self._clock()
        try:
            async with asyncio.timeout_at(deadline) as timer:
                turn = await self._sample(record)
        except TimeoutError:
            if timer.expired():
                return Outcome.DEADLINE
            raise
        record.model_s = self._clock() - started
        turn = settle(turn, self._ids)
        self._keep(turn, record)
        return await self._after_sampling(turn, record, deadline)

    async def _sample(self, record: TurnRecord) -> ModelTurn:
        """Fit the prompt and ask for a turn, again after transport faults, and shorter when it was too long."""
        self._send()
        self._note_truncation(await self._window.fit())
        shrinks = 0

        def count_retry() -> None:
            record.retries += 1

        while True:
            try:
                return await with_retries(self._ask, self._config.retry, on_failure=count_retry)
            except ContextTooLong:
                shrinks += 1
                if shrinks > MAX_SHRINKS:
                    raise
                self._note_truncation(await self._window.shrink())

    async def _ask(self) -> ModelTurn:
        sampling = self._config.sampling
        remaining = self._remaining_tokens()
        if remaining is not None:
            sampling = replace(sampling, max_tokens=min(remaining, sampling.max_tokens or remaining))
        try:
            return await self.conversation.sample(sampling)
        except Exception as error:  # anything a server raises is a model error: it ends this rollout and no other
            if not isinstance(error, ModelError):
                log.exception("the model server raised an unexpected error")
            raise translate(error) from error

    def _keep(self, turn: ModelTurn, record: TurnRecord) -> None:
        message = assistant_message(turn)
        self.messages.append(message)
        self._window.sampled(turn, message)
        self.reasoning.append(turn.reasoning)
        record.prompt_tokens = turn.prompt_tokens
        record.sampled_tokens = turn.sampled_tokens
        record.finish_reason = turn.finish_reason
        record.content_chars = len(turn.content)
        record.reasoning_chars = len(turn.reasoning or "")
        record.tool_calls = len(turn.calls)
        record.malformed = sum(call.error is not None for call in turn.calls)
        self.turns.append(record)
        self._sampled_tokens += _tokens_of(turn, message)

    async def _after_sampling(self, turn: ModelTurn, record: TurnRecord, deadline: float | None) -> Outcome | None:
        if turn.finish_reason in BROKEN_OFF:
            self._extend(self.tools.skip(turn, record, "the server broke off the turn"))
            raise ModelError(f"the server broke off a turn (finish reason {turn.finish_reason!r})")
        if turn.finish_reason == "length":
            self._extend(self.tools.skip(turn, record, "the turn was cut off at its token limit"))
            budget = self._limits.max_sampled_tokens
            spent = budget is not None and self._sampled_tokens >= budget
            return Outcome.MAX_SAMPLED_TOKENS if spent else Outcome.LENGTH
        if not turn.calls:
            return Outcome.FINISHED
        return await self._run_tools(turn, record, deadline)

    async def _run_tools(self, turn: ModelTurn, record: TurnRecord, deadline: float | None) -> Outcome | None:
        started = self._clock()
        results: list[Message] = []
        try:
            outcome = await self.tools.run(turn, record, deadline, results)
        finally:
            record.tools_s = self._clock() - started
            self._extend(results)
        if outcome is None and self._past_deadline():
            return Outcome.DEADLINE
        return outcome

    def _extend(self, messages: Sequence[Message]) -> None:
        """Add to the trajectory; the conversation gets it only if there is another turn."""
        self.messages.extend(messages)
        self._unsent.extend(messages)

    def _send(self) -> None:
        if self._unsent:
            self.conversation.append(self._unsent)
            self._window.append(self._unsent)
            self._unsent = []

    def _past_deadline(self) -> bool:
        return self._deadline is not None and self._clock() >= self._deadline

    def _remaining_tokens(self) -> int | None:
        budget = self._limits.max_sampled_tokens
        return None if budget is None else budget - self._sampled_tokens

    def _note_truncation(self, report: Mapping[str, Any] | None) -> None:
        if report is not None:
            self.truncations.append({"turn": self.turns_begun, **report})


def _tokens_of(turn: ModelTurn, message: Message) -> int:
    """Sampled tokens of a turn; by its characters where the server does not say."""
    if turn.sampled_tokens is not None:
        return turn.sampled_tokens
    calls = sum(len(str(call["function"])) for call in message.get("tool_calls", ()))
    return (len(turn.content) + len(turn.reasoning or "") + calls) // CHARS_PER_TOKEN
