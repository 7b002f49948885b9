"""The tool half of a turn: plan the calls, run them, keep records, and give back one message per call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent_loop.context.result_budget import BudgetedResult, ResultBudget, apply_budget, shorten
from agent_loop.limits import Limits
from agent_loop.model.contract import Message, ModelTurn
from agent_loop.outcome import Outcome
from agent_loop.records.result import ToolCallRecord, ToolError, TurnRecord
from agent_loop.turn.calls import CallPlanner, Dispatcher, Executed, PlannedCall, not_run
from agent_loop.turn.messages import sendable, shown, tool_message
from agent_loop.turn.runtime import NestedCall, ToolOutcome, ToolRuntime, ToolStatus

_FAILED = frozenset(
    {
        ToolStatus.ERROR,
        ToolStatus.TIMEOUT,
        ToolStatus.INVALID,
        ToolStatus.UNKNOWN,
        ToolStatus.MALFORMED,
        ToolStatus.LOST,
    }
)


class ToolTurns:
    """Runs the calls of each turn of one rollout and keeps the records of all of them."""

    def __init__(self, runtime: ToolRuntime, planner: CallPlanner, limits: Limits, budget: ResultBudget) -> None:
        self.records: list[ToolCallRecord] = []
        self.errors: list[ToolError] = []
        self.lost: str | None = None
        """What the sandbox said when it was lost."""
        self._runtime = runtime
        self._planner = planner
        self._limits = limits
        self._budget = budget
        self._dispatcher = Dispatcher(runtime, limits)
        self._calls_run = 0

    def skip(self, turn: ModelTurn, record: TurnRecord, reason: str) -> list[Message]:
        """Answer every call of a turn without running it."""
        planned = [self._planner.plan(call, record.turn) for call in turn.calls]
        outcomes = [not_run(reason)] * len(planned)
        return self._close(planned, [Executed(outcome) for outcome in outcomes], [out.text for out in outcomes])

    async def run(
        self, turn: ModelTurn, record: TurnRecord, deadline: float | None, results: list[Message]
    ) -> Outcome | None:
        """Run the calls and fill `results`, on cancellation too; the outcome if this ends the rollout."""
        planned = [self._planner.plan(call, record.turn) for call in turn.calls]
        beyond = self._hold_back(planned)
        ready = [plan.ready for plan in planned if plan.ready is not None]
        self._calls_run += len(ready)
        record.parallel = self._dispatcher.parallel(ready)
        done: dict[str, Executed] = {}
        texts: list[BudgetedResult] = []
        try:
            await self._dispatcher.run(ready, deadline, done)
            executed = [self._executed(plan, done) for plan in planned]
            texts = await self._budgeted(planned, executed)
        finally:
            executed = [self._executed(plan, done) for plan in planned]
            results += self._close(planned, executed, texts or self._cut(planned, executed))
        if self.lost is not None:
            return Outcome.SANDBOX_LOST
        return Outcome.MAX_TOOL_CALLS if beyond else None

    def _hold_back(self, planned: Sequence[PlannedCall]) -> bool:
        """Refuse calls beyond `max_tool_calls`; whether there were any."""
        if self._limits.max_tool_calls is None:
            return False
        allowed = self._limits.max_tool_calls - self._calls_run
        beyond = [plan for plan in planned if plan.ready is not None][max(allowed, 0) :]
        for plan in beyond:
            plan.ready = None
            plan.refusal = not_run(f"the limit of {self._limits.max_tool_calls} tool calls is reached")
        return bool(beyond)

    def _executed(self, plan: PlannedCall, done: dict[str, Executed]) -> Executed:
        if plan.refusal is not None:
            return Executed(plan.refusal)
        return done.get(plan.record.call_id) or Executed(not_run("the rollout ended first"))

    async def _budgeted(self, planned: Sequence[PlannedCall], executed: Sequence[Executed]) -> list[BudgetedResult]:
        results = [(plan.call.name, done.outcome.text) for plan, done in zip(planned, executed, strict=True)]
        return await apply_budget(results, self._budget, self._runtime.store_result)

    def _cut(self, planned: Sequence[PlannedCall], executed: Sequence[Executed]) -> list[str]:
        """Results of an interrupted turn: shortened, but not stored, because the sandbox is not ours any more."""
        limits = [self._budget.limit_for(plan.call.name) for plan in planned]
        texts = [done.outcome.text for done in executed]
        return [text if limit is None else shorten(text, limit) for text, limit in zip(texts, limits, strict=True)]

    def _close(
        self, planned: Sequence[PlannedCall], executed: Sequence[Executed], texts: Sequence[BudgetedResult | str]
    ) -> list[Message]:
        """Records and one tool message for every call."""
        messages: list[Message] = []
        for plan, done, result in zip(planned, executed, texts, strict=True):
            text = sendable(result if isinstance(result, str) else result.text)
            record = _filled(plan.record, done)
            if not isinstance(result, str):
                record.stored_path = result.stored_path
            self.records.append(record)
            self.records.extend(_nested(record, index, call) for index, call in enumerate(done.outcome.nested))
            if record.status in _FAILED:
                self.errors.append(_tool_error(record, text))
            if record.status is ToolStatus.LOST:
                self.lost = record.error or "the sandbox was lost"
            messages.append(tool_message(plan.call, text))
        return messages


def _filled(record: ToolCallRecord, done: Executed) -> ToolCallRecord:
    outcome: ToolOutcome = done.outcome
    record.status = outcome.status
    record.duration_s = done.duration_s
    record.exit_code = outcome.exit_code
    record.result_chars = len(outcome.text)
    record.error = outcome.error
    record.metadata = dict(outcome.metadata)
    return record


def _nested(parent: ToolCallRecord, index: int, call: NestedCall) -> ToolCallRecord:
    return ToolCallRecord(
        turn=parent.turn,
        call_id=f"{parent.call_id}/{index}",
        name=call.name,
        raw_arguments=dict(call.arguments),
        arguments=dict(call.arguments),
        status=call.status,
        schema_valid=call.status not in (ToolStatus.INVALID, ToolStatus.UNKNOWN),
        duration_s=call.duration_s,
        exit_code=call.exit_code,
        result_chars=call.result_chars,
        error=call.error,
        parent=parent.call_id,
    )


def _tool_error(record: ToolCallRecord, told: str) -> ToolError:
    raw: Any = record.raw_arguments
    arguments = raw if isinstance(raw, str) else shown(raw)
    return ToolError(record.turn, record.name, arguments[:200], record.error or "", told[:500])
