"""What a rollout returns: the fields of hermes-agent, and with them outcome, records, metrics and training data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_loop.model.contract import ManagedState, Message, Segment
from agent_loop.outcome import Outcome
from agent_loop.records.record import RolloutRecord, SampledCall
from agent_loop.turn.messages import storable
from agent_loop.turn.tool_call import ToolCallRecord


@dataclass
class ToolError:
    """One failed tool call, as hermes-agent lists them."""

    turn: int
    tool_name: str
    arguments: str
    """As the model wrote them, cut at 200 characters."""
    error: str
    tool_result: str
    """What the model was told, cut at 500 characters."""


@dataclass
class TurnRecord:
    """One sampled turn."""

    turn: int
    """1-based."""
    model_s: float
    tools_s: float = 0.0
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None
    finish_reason: str = ""
    content_chars: int = 0
    reasoning_chars: int = 0
    tool_calls: int = 0
    malformed: int = 0
    """Calls of this turn whose markup could not be read."""
    retries: int = 0
    """Requests to the model that failed before the one that answered."""
    parallel: bool = False
    """Whether the turn's calls ran at the same time."""


class _MadeWhenRead:
    """`managed_state` may be given as a function, which is called when somebody first reads it."""

    def __get__(self, result: AgentResult | None, owner: type | None = None) -> dict[str, Any] | None:
        if result is None:
            return None  # the default
        state: ManagedState = vars(result)["managed_state"]
        if callable(state):
            state = vars(result)["managed_state"] = state()
        return state

    def __set__(self, result: AgentResult, state: ManagedState) -> None:
        vars(result)["managed_state"] = state


@dataclass
class AgentResult:
    """Everything one rollout left behind. `messages` is the full trajectory, however the prompt was truncated."""

    messages: list[Message]
    managed_state: _MadeWhenRead = _MadeWhenRead()
    turns_used: int = 0
    finished_naturally: bool = False
    reasoning_per_turn: list[str | None] = field(default_factory=list)
    tool_errors: list[ToolError] = field(default_factory=list)
    tool_calls_attempted: int = 0
    tool_calls_schema_valid: int = 0
    tool_calls_executed_ok: int = 0
    tool_calls_exec_error: int = 0
    outcome: Outcome = Outcome.CANCELLED
    """The default is an outcome that is not trained on."""
    error: str | None = None
    """What ended an untrainable rollout, in one sentence."""
    turns: list[TurnRecord] = field(default_factory=list)
    tool_calls: list[ToolCallRecord] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    """Token-exact training data; empty when the server gives no tokens, which `has_tokens` says."""
    wire_log: Callable[[], list[SampledCall]] = field(default=list, repr=False)
    """Makes `sampled_calls`, which repeat every prompt whole: for long rollouts that is far more than the rest."""
    truncations: list[dict[str, Any]] = field(default_factory=list)
    timing: dict[str, float] = field(default_factory=dict)

    @property
    def sampled_calls(self) -> list[SampledCall]:
        """Every request to the model as it went over the wire; empty when the server gives no tokens."""
        return self.wire_log()

    @property
    def trainable(self) -> bool:
        """Whether this shows what the policy does: an outcome of its own, and at least one turn that it sampled."""
        return self.outcome.trainable and bool(self.turns)

    @property
    def has_tokens(self) -> bool:
        """Whether the server gave tokens: never invented where it did not."""
        return bool(self.segments)

    def fill(self, record: RolloutRecord) -> None:
        """Put everything that the loop knows into a stored record, as plain data."""
        record.outcome = self.outcome.value
        record.trainable = self.trainable
        record.messages = self.messages
        record.has_tokens = self.has_tokens
        record.segments = self.segments
        record.sampled_calls = self.sampled_calls
        record.turns = [dict(vars(turn)) for turn in self.turns]
        record.tool_calls = [_stored(call) for call in self.tool_calls]
        record.metrics = self.metrics
        record.truncations = self.truncations
        record.timing |= self.timing
        record.error = self.error


def _stored(call: ToolCallRecord) -> dict[str, Any]:
    stored: dict[str, Any] = storable({key: value for key, value in vars(call).items() if key not in _NOT_STORED})
    return stored


_NOT_STORED = frozenset({"text", "nested"})
"""Fields of a call that the record has elsewhere: in the tool messages, and as calls of their own."""
