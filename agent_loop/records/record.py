"""What a rollout leaves: `AgentResult` in memory, `RolloutRecord` as a line of a rollouts.jsonl.

The line is what `process` and `demo` write and `verify` and `view` read. Everything a reader needs is in the line
itself, so that a file can be checked and looked at years later.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import GenericAlias
from typing import Any, NotRequired, get_type_hints

import orjson
from pydantic import TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from agent_loop.model.contract import ManagedState, Message, Segment, ToolSchema, WeightsSpan
from agent_loop.outcome import Outcome
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
    message: int | None = None
    """Place of the sampled message in `messages`."""


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
    vocabulary: Callable[[], dict[str, Piece]] = field(default=dict, repr=False)
    """Makes `RolloutRecord.pieces`."""
    truncations: list[dict[str, Any]] = field(default_factory=list)
    timing: dict[str, float] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: RolloutRecord) -> AgentResult:
        """What a stored rollout knows of its result; tool calls without the text, which the tool messages have."""
        known = {outcome.value for outcome in Outcome}
        return cls(
            messages=record.messages,
            turns_used=len(record.turns),
            finished_naturally=record.outcome == Outcome.FINISHED.value,
            outcome=Outcome(record.outcome) if record.outcome in known else Outcome.FINISHED,
            error=record.error,
            turns=[TurnRecord(**turn) for turn in record.turns],
            tool_calls=[ToolCallRecord(**call) for call in record.tool_calls],
            metrics=record.metrics,
            segments=record.segments,
            wire_log=lambda: record.sampled_calls,
            truncations=record.truncations,
            timing=record.timing,
            tool_calls_attempted=int(record.metrics.get("tool_calls_attempted", 0)),
            tool_calls_schema_valid=int(record.metrics.get("tool_calls_schema_valid", 0)),
            tool_calls_executed_ok=int(record.metrics.get("tool_calls_executed_ok", 0)),
            tool_calls_exec_error=int(record.metrics.get("tool_calls_exec_error", 0)),
        )

    @property
    def sampled_calls(self) -> list[SampledCall]:
        """Every request to the model as it went over the wire; empty when the server gives no tokens."""
        return self.wire_log()

    @property
    def trainable(self) -> bool:
        """Whether this shows what the policy does: an outcome of its own, and at least one turn that it sampled."""
        return self.outcome.trainable and bool(self.turns)

    @property
    def sampled_by(self) -> list[int | None]:
        """For each message the number of the turn, and so of the call, that sampled it; None when it was given."""
        turn_of = {turn.message: number for number, turn in enumerate(self.turns)}
        return [turn_of.get(place) for place in range(len(self.messages))]

    @property
    def final_answer(self) -> str:
        """What the model said last, without a tool call; empty when the rollout ended in another way."""
        last = self.messages[-1] if self.outcome is Outcome.FINISHED and self.messages else {}
        return str(last.get("content") or "") if last.get("role") == "assistant" else ""

    @property
    def has_tokens(self) -> bool:
        """Whether the server gave tokens: never invented where it did not."""
        return bool(self.segments)

    def fill(self, record: RolloutRecord) -> None:
        """Put everything that the loop knows into a stored record, as plain data."""
        record.outcome = self.outcome.value
        record.trainable = self.trainable
        record.messages = self.messages
        record.sampled_by = self.sampled_by
        record.has_tokens = self.has_tokens
        record.segments = self.segments
        record.sampled_calls = self.sampled_calls
        record.pieces = self.vocabulary()
        record.turns = [dict(vars(turn)) for turn in self.turns]
        record.tool_calls = [_without_text(call) for call in self.tool_calls]
        record.metrics = self.metrics
        record.truncations = self.truncations
        record.timing |= self.timing
        record.error = self.error


def _without_text(call: ToolCallRecord) -> dict[str, Any]:
    stored: dict[str, Any] = storable({key: value for key, value in vars(call).items() if key not in _NOT_STORED})
    return stored


_NOT_STORED = frozenset({"text", "nested"})
"""Fields of a call that the record has elsewhere: in the tool messages, and as calls of their own."""


RECORD_VERSION = 1
Piece = str | list[int]
"""The text of a token; its bytes where they are only a part of a character."""


@dataclass
class SampledCall:
    """One request to the model as it went over the wire: enough to prove the segments right."""

    segment: int
    prompt_ids: list[int]
    sampled_ids: list[int]
    logprobs: list[float]
    """Of the sampled ids under the model: at temperature 1, before filters and penalties, however they were sampled."""
    finish_reason: str
    duration_s: float = 0.0
    weights_version: str | None = None
    """The weights that sampled it, or its first token when they changed on the way."""
    weights_spans: list[WeightsSpan] = field(default_factory=list)
    """Which weights sampled which of its tokens, from servers that say it per token."""
    temperature: float | None = None
    """At which it was sampled; `logprobs` do not depend on it."""
    entropies: list[float | None] = field(default_factory=list)
    """Of the model's distribution at each sampled id, in nats; empty where the server did not tell. From its likeliest
    tokens alone, so at most the true one."""

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> SampledCall:
        """A call as it stands in a stored line."""
        return cls(**data | {"weights_spans": [WeightsSpan(**span) for span in data.get("weights_spans", [])]})


def covers(spans: Sequence[WeightsSpan], tokens: int) -> bool:
    """Whether spans follow each other from the first to the last of so many tokens."""
    ends = [0, *(span.end for span in spans)]
    return ends[-1] == tokens and all(s.start == before < s.end for s, before in zip(spans, ends, strict=False))


@dataclass
class RolloutRecord:
    """A whole rollout. Token fields are empty when the server gave no tokens (`has_tokens` says which)."""

    rollout_id: str
    group_id: str
    environment: str
    item_id: str
    outcome: str
    trainable: bool
    messages: list[Message]
    sampled_by: list[int | None] = field(default_factory=list)
    """For each message the index into `sampled_calls`, and into `turns`, of what sampled it; null for those that were
    given: prompts, examples, tool results."""
    tools: list[ToolSchema] = field(default_factory=list)
    score: float | None = None
    """The reward given to the trainer; None when the rollout is not trainable."""
    verifier_score: float | None = None
    reward_components: dict[str, float] = field(default_factory=dict)
    roles: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What the rollout asked of the judge and of the user: requests, tokens, cost, and the judge's verdicts."""
    turn_rewards: list[float] = field(default_factory=list)
    """Points per sampled turn, where the environment gives them; they enter the advantage of that turn's tokens."""
    turn_scores: list[float] = field(default_factory=list)
    """Score of what the workspace held after each sampled turn, where the environment gives it; not trained on."""
    end_state: dict[str, str] = field(default_factory=dict)
    """Path -> text of the files that the agent left in its workspace, with `env.store_end_state`."""
    category: str = ""
    policy: str = ""
    """Model or scripted policy that played."""
    seed: int | None = None
    has_tokens: bool = False
    segments: list[Segment] = field(default_factory=list)
    sampled_calls: list[SampledCall] = field(default_factory=list)
    pieces: dict[str, Piece] = field(default_factory=dict)
    """Token id -> its text, for every id in `segments`; a list of bytes where they are only a part of a character."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    truncations: list[dict[str, Any]] = field(default_factory=list)
    """One entry per context truncation: the turn before which it happened and what was shortened or dropped."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds: model_s, tools_s, acquire_s, verify_s, total_s."""
    isolation: str = ""
    network: list[dict[str, Any]] = field(default_factory=list)
    """Hosts that programs in the slot asked its proxy for, with the result and how often; `phase` is prepare or
    rollout. Empty without network rules."""
    error: str | None = None
    """What ended an untrainable rollout, in one sentence."""
    probe: str = ""
    """What the hack meter tried here: `impossible`, `tripwire`, or nothing."""
    hack: str = ""
    """What proves that this rollout cheated; empty when nothing does."""
    version: int = RECORD_VERSION

    def to_json(self) -> bytes:
        """One line of JSON, without the newline."""
        return orjson.dumps(self)

    @classmethod
    def from_json(cls, line: bytes | str) -> RolloutRecord:
        """Read one line; raises ValueError naming the first key that is wrong."""
        data = orjson.loads(line)
        if not isinstance(data, dict):
            raise ValueError("a rollout record is a JSON object")
        if data.get("version") != RECORD_VERSION:
            raise ValueError(f"record version {data.get('version')!r} is not {RECORD_VERSION}")
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"unknown key {unknown[0]!r} in a rollout record")
        try:
            _stored_line().validate_python(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ValueError(f"not a rollout record: {where}: {first['msg'].lower()}") from error
        data["segments"] = [Segment(**s) for s in data.get("segments", [])]
        data["sampled_calls"] = [SampledCall.from_data(c) for c in data.get("sampled_calls", [])]
        return cls(**data)


@with_config(strict=True, extra="allow")
class _Named(TypedDict):
    name: NotRequired[str]


@with_config(strict=True, extra="allow")
class _Function(TypedDict):
    """A tool's schema, or a call of it: others say what more is in it."""

    function: NotRequired[_Named]


@with_config(strict=True, extra="allow")
class _Message(TypedDict):
    role: str
    content: NotRequired[str | list[dict[str, Any]] | None]
    tool_calls: NotRequired[list[_Function] | None]


@cache
def _stored_line() -> TypeAdapter[Any]:
    """Asks for the type of everything in a line, however deep, so that no reader of a record need ask."""
    span, turn = _stored(WeightsSpan), _stored(TurnRecord)
    # A logprob that is no number is written as null: `verify` has the words for it.
    segment = _stored(Segment, logprobs=list[float | None])
    sampled = _stored(SampledCall, logprobs=list[float | None], weights_spans=GenericAlias(list, span))
    call = _stored(ToolCallRecord, status=str | None, repairs=list[str], nested=list[Any])
    parts: dict[str, Any] = {"messages": _Message, "tools": _Function, "segments": segment, "sampled_calls": sampled}
    lists = {name: GenericAlias(list, part) for name, part in (parts | {"turns": turn, "tool_calls": call}).items()}
    return TypeAdapter(_stored(RolloutRecord, **lists))


def _stored(kind: type[Any], **inner: Any) -> Any:
    """A dataclass as the JSON object that stands for it, with other types for some of its fields."""
    needed = {
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    hints = get_type_hints(kind) | inner
    make: Any = TypedDict
    fields = {name: hint if name in needed else NotRequired[hint] for name, hint in hints.items()}
    return with_config(strict=True, extra="forbid")(make(kind.__name__, fields))
