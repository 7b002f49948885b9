"""`HermesAgentLoop`: the class of hermes-agent, with its arguments.

It accepts what users have (a `ModelServer`, an `AsyncOpenAI`, a `chat_completion` server; a `ToolRuntime` or a
`tool_handler`), runs rollouts, and turns every end into an `AgentResult` with an outcome. Nothing here is global to the
process: hundreds of loops share one event loop, with no thread pool and no blocking call.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent_loop.context.result_budget import ResultBudget
from agent_loop.context.strategies import Strategy
from agent_loop.context.window import ContextOverflow, ContextPolicy
from agent_loop.limits import Limits
from agent_loop.model.chat import TextParser, as_model_server
from agent_loop.model.contract import ContextTooLong, Message, ModelError, Sampling, ToolSchema
from agent_loop.model.errors import RetryPolicy
from agent_loop.outcome import Outcome
from agent_loop.records.metrics import rollout_metrics
from agent_loop.records.result import AgentResult
from agent_loop.rollout import Rollout, RolloutConfig
from agent_loop.turn.runtime import HandlerRuntime, ToolHandler, ToolRuntime
from sandbox_pool.errors import SandboxError

log = logging.getLogger(__name__)


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
    ) -> None:
        """`sampling`, `limits` and `context` hold several values at once; giving a value both ways is an error.

        `model` names the model for an `AsyncOpenAI`; `tool_parser` (one of `tool_parsers` or its name) reads calls from
        the text where a chat server does not; `parallel_tools` names tools that `tool_handler` may run together.
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
            server=as_model_server(server, model, tool_parser),
            tools=tools,
            valid_names=frozenset(map(_name, tools) if valid_tool_names is None else valid_tool_names),
            runtime=_runtime(runtime, tool_handler, tools, self.task_id, parallel_tools),
            sampling=sampling or Sampling(temperature, max_tokens, extra_body=dict(extra_body or {})),
            limits=limits or Limits(max_turns=max_turns),
            context=replace(context, strategies=tuple(context_strategies)) if context_strategies else context,
            budget=budget_config or ResultBudget(),
            retry=retry or RetryPolicy(),
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
