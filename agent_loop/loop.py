"""`HermesAgentLoop`: the class of hermes-agent, with its arguments.

It accepts what users have (a `ModelServer`, an `AsyncOpenAI`, a `chat_completion` server; a `ToolRuntime` or a
`tool_handler`), runs rollouts, and turns every end into an `AgentResult` with an outcome. Nothing here is global to the
process: hundreds of loops share one event loop, with no thread pool and no blocking call.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from agent_loop.context.result_budget import ResultBudget
from agent_loop.context.strategies import CHARS_PER_TOKEN, Strategy
from agent_loop.context.window import ContextOverflow, ContextPolicy, ContextWindow
from agent_loop.fairness import wait_in_line
from agent_loop.limits import Limits
from agent_loop.model.chat import ChatServer, TextParser
from agent_loop.model.contract import ContextTooLong, Message, ModelError, ModelServer, ModelTurn, Sampling, ToolSchema
from agent_loop.model.errors import RetryPolicy, translate, with_retries
from agent_loop.outcome import Outcome
from agent_loop.records.metrics import rollout_metrics
from agent_loop.records.record import AgentResult, TurnRecord
from agent_loop.turn.calls import CallPlanner, ToolTurns, earliest
from agent_loop.turn.messages import CallIds, assistant_message, settle
from agent_loop.turn.runtime import HandlerRuntime, ToolHandler, ToolRuntime
from sandbox_pool.errors import SandboxDestroyed, SandboxError

log = logging.getLogger(__name__)

BROKEN_OFF = frozenset({"abort", "error"})
"""Finish reasons by which engines say that they gave up on a request."""
MAX_SHRINKS = 3
"""Times one turn's prompt is cut further after the server called it too long."""


User = Callable[[Sequence[Message]], Awaitable[str | None]]
"""Given the trajectory after a turn without calls, says what the user answers; None ends the conversation."""


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
    on_activity: Callable[[str], None] = lambda what: None
    user: User | None = None
    unlisted: Sequence[ToolSchema] = ()


class Rollout:
    """The state of one rollout; `drive` runs it to its end."""

    def __init__(self, config: RolloutConfig, messages: list[Message]) -> None:
        self.messages = messages
        self.turns: list[TurnRecord] = []
        self.reasoning: list[str | None] = []
        self.truncations: list[dict[str, Any]] = []
        self.turns_begun = 0
        self.conversation = config.server.open(messages, config.tools)
        planner = CallPlanner(config.tools, config.valid_names, config.unlisted)
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
        self._config.on_activity(f"turn {self.turns_begun}: the model samples")
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
        record.message = len(self.messages)
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
            return None if await self._notice_to_come(deadline) else await self._hear_user(deadline)
        return await self._run_tools(turn, record, deadline)

    async def _notice_to_come(self, deadline: float | None) -> bool:
        """Whether the model, which has answered, gets another turn: a process that it wants to hear of still ran."""
        if self._before_turn() is not None:
            return False
        allowed = self._limits.tool_timeout_s
        until = earliest(deadline, None if allowed is None else self._clock() + allowed)
        try:
            async with asyncio.timeout_at(until):
                return await self._config.runtime.wait_for_notice()
        except TimeoutError:
            return False

    async def _hear_user(self, deadline: float | None) -> Outcome | None:
        """The user's answer as a message that nobody sampled, so it is not trained on. Raises `ModelError`."""
        if self._config.user is None:
            return Outcome.FINISHED
        self._config.on_activity(f"turn {self.turns_begun}: the user answers")
        try:
            async with asyncio.timeout_at(deadline) as timer:
                answer = await self._config.user(self.messages)
        except TimeoutError:
            if timer.expired():
                return Outcome.DEADLINE
            raise
        if answer is None:
            return Outcome.FINISHED
        self._extend([{"role": "user", "content": answer}])
        return None

    async def _run_tools(self, turn: ModelTurn, record: TurnRecord, deadline: float | None) -> Outcome | None:
        started = self._clock()
        self._config.on_activity(f"turn {self.turns_begun}: running {', '.join(call.name[:64] for call in turn.calls)}")
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


class HermesAgentLoop:
    """Multi-turn tool calling over one model server and one set of tools."""

    def __init__(
        self,
        server: Any,
        tool_schemas: Sequence[ToolSchema] | None = None,
        valid_tool_names: Collection[str] | None = None,
        max_turns: int = 30,
        task_id: str | None = None,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        extra_body: Mapping[str, Any] | None = None,
        tool_handler: ToolHandler | None = None,
        max_context_tokens: int | None = None,
        budget_config: ResultBudget | None = None,
        *,
        runtime: ToolRuntime | None = None,
        model: str | None = None,
        tool_parser: TextParser | str | None = "hermes",
        parallel_tools: Collection[str] = (),
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        retry: RetryPolicy | None = None,
        context: ContextPolicy | None = None,
        context_strategies: Sequence[Strategy] = (),
        on_activity: Callable[[str], None] | None = None,
        user: User | None = None,
        unlisted: Sequence[ToolSchema] = (),
    ) -> None:
        """`sampling`, `limits` and `context` hold several values at once; giving a value both ways is an error.

        `model` names the model for an `AsyncOpenAI`; `tool_parser` (one of `tool_parsers` or its name) reads calls from
        the text where a chat server does not; `parallel_tools` names tools that `tool_handler` may run together;
        `on_activity` is told each turn and each round of calls, for whoever watches that something happens. `user`
        answers turns without calls, and ends the conversation with None. `unlisted` are tools of the `runtime` that the
        prompt does not show: the conversation may tell of them later.
        """
        _said_once("limits", limits, max_turns=max_turns != 30)
        _said_once("context", context, max_context_tokens=max_context_tokens is not None)
        singles = {
            "temperature": temperature != 1.0,
            "max_tokens": max_tokens is not None,
            "extra_body": bool(extra_body),
        }
        _said_once("sampling", sampling, **singles)
        self.task_id = task_id or str(uuid.uuid4())
        tools = list(tool_schemas if tool_schemas is not None else runtime.schemas() if runtime else ())
        context = context or ContextPolicy(max_tokens=max_context_tokens)
        self._config = RolloutConfig(
            server=server if isinstance(server, ModelServer) else ChatServer(server, model, tool_parser),
            tools=tools,
            valid_names=frozenset(map(_name, tools) if valid_tool_names is None else valid_tool_names),
            runtime=_runtime(runtime, tool_handler, tools, self.task_id, parallel_tools),
            sampling=sampling or Sampling(temperature, max_tokens, extra_body=dict(extra_body or {})),
            limits=limits or Limits(max_turns=max_turns),
            context=replace(context, strategies=tuple(context_strategies)) if context_strategies else context,
            budget=budget_config or ResultBudget(),
            retry=retry or RetryPolicy(),
            on_activity=on_activity or (lambda what: None),
            user=user,
            unlisted=tuple(unlisted),
        )
        self._running: set[asyncio.Task[Any]] = set()
        self._cancelled: set[asyncio.Task[Any]] = set()

    async def run(self, messages: list[Message]) -> AgentResult:
        """Run one rollout. `messages` grows in place into the full trajectory, which the result holds.

        Cancelling the task that awaits this stops the running command and raises; `cancel()` stops it and returns.
        Messages that the server cannot even open a conversation with raise: that is a mistake, not an outcome.
        """
        clock = asyncio.get_running_loop().time
        started = clock()
        rollout = Rollout(self._config, messages)
        outcome, error = await self._drive(rollout)
        return _result(rollout, outcome, error, clock() - started)

    def cancel(self) -> None:
        """End every running rollout of this loop: commands are stopped, `run` returns with outcome `cancelled`."""
        for task in self._running:
            self._cancelled.add(task)
            task.cancel()

    async def _drive(self, rollout: Rollout) -> tuple[Outcome, str | None]:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("run() must be awaited in a task")
        self._running.add(task)
        try:
            outcome = await rollout.drive()
            late = "the deadline of the turn or of the rollout passed" if outcome is Outcome.DEADLINE else None
            return outcome, rollout.tools.lost or late
        except (ContextOverflow, ContextTooLong) as error:
            return Outcome.CONTEXT_OVERFLOW, str(error)
        except ModelError as error:
            log.warning("rollout %s ended: %s", self.task_id, error)
            return Outcome.API_ERROR, str(error)
        except SandboxDestroyed as error:
            return Outcome.AGENT_FAULT, f"{type(error).__name__}: {error}"
        except SandboxError as error:
            return Outcome.SANDBOX_LOST, f"{type(error).__name__}: {error}"
        except asyncio.CancelledError:
            # The same bookkeeping as asyncio.timeout: only our own request is answered here, anybody else's goes on.
            if task in self._cancelled and task.uncancel() == 0:
                return Outcome.CANCELLED, "cancelled"
            raise
        finally:
            self._running.discard(task)
            self._cancelled.discard(task)


def _result(rollout: Rollout, outcome: Outcome, error: str | None, total_s: float) -> AgentResult:
    turns, calls = rollout.turns, rollout.tools.records
    metrics = rollout_metrics(turns, calls, outcome, len(rollout.truncations))
    segments = rollout.conversation.segments()
    if segments:
        metrics["segments"] = float(len(segments))
    return AgentResult(
        messages=rollout.messages,
        managed_state=rollout.conversation.state(),
        turns_used=rollout.turns_begun,
        finished_naturally=outcome is Outcome.FINISHED,
        reasoning_per_turn=rollout.reasoning,
        tool_errors=rollout.tools.errors,
        tool_calls_attempted=int(metrics["tool_calls_attempted"]),
        tool_calls_schema_valid=int(metrics["tool_calls_schema_valid"]),
        tool_calls_executed_ok=int(metrics["tool_calls_executed_ok"]),
        tool_calls_exec_error=int(metrics["tool_calls_exec_error"]),
        outcome=outcome,
        error=error,
        turns=turns,
        tool_calls=calls,
        metrics=metrics,
        segments=segments,
        wire_log=getattr(rollout.conversation, "sampled_calls", list),
        vocabulary=getattr(rollout.conversation, "pieces", dict),
        truncations=rollout.truncations,
        timing={"model_s": metrics["model_s"], "tools_s": metrics["tools_s"], "total_s": total_s},
    )


def _said_once(name: str, whole: object | None, **given: bool) -> None:
    """Refuse a value that the object given with it would silently override."""
    if whole is not None and any(given.values()):
        single = next(single for single, is_given in given.items() if is_given)
        raise ValueError(f"{single} was given together with {name}: put it into {name}")


def _runtime(
    runtime: ToolRuntime | None,
    handler: ToolHandler | None,
    tools: Sequence[ToolSchema],
    task_id: str,
    parallel_tools: Collection[str],
) -> ToolRuntime:
    """What runs the calls: the handler if there is one (the runtime then only stores results), else the runtime."""
    if handler is not None:
        return HandlerRuntime(handler, tools, task_id, parallel_tools, base=runtime)
    if runtime is not None:
        return runtime
    if tools:
        raise ValueError("tools need a `runtime` or a `tool_handler` to run them")
    return HandlerRuntime(_no_tools, (), task_id)


def _name(tool: ToolSchema) -> str:
    return str(tool.get("function", tool).get("name"))


async def _no_tools(name: str, arguments: dict[str, Any], task_id: str) -> str:
    raise RuntimeError("this rollout has no tools")
