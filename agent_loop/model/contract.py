"""The one interface between the loop and whatever samples: open a conversation, append, sample.

A conversation belongs to one rollout and only grows. Truncation is the single edit: `restart` begins a new
segment from a shorter view. Implementations: `chat.py` (any OpenAI-compatible server, no tokens) and
`recorder.py` (ids in, ids and logprobs out, token-exact).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from agent_loop.turn.tool_call import ToolCallRecord

Message = dict[str, Any]
"""An OpenAI chat message: role, content, and by role tool_calls, tool_call_id, name, reasoning_content."""

ToolSchema = dict[str, Any]
"""An OpenAI tool: {"type": "function", "function": {"name", "description", "parameters"}}."""


class ModelError(Exception):
    """The model could not be asked, or did not answer as it should."""


class ModelUnavailable(ModelError):
    """Transport fault (connection, 429, 5xx): worth another try."""

    retry_after_s: float | None = None
    """How long the server asked to be left alone, when it did."""


class ModelRefused(ModelError):
    """The server refused the request (4xx) or answered nonsense: another try would end the same way."""


class ContextTooLong(ModelRefused):
    """The prompt does not fit the model's context."""


@dataclass(frozen=True)
class Sampling:
    """How to sample one turn. Values that are None are left to the server."""

    temperature: float = 1.0
    max_tokens: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    extra_body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelTurn:
    """One sampled assistant turn."""

    content: str
    calls: tuple[ToolCallRecord, ...] = ()
    """As the model wrote them; the loop works on copies. Unreadable markup is a call with an `error`."""
    reasoning: str | None = None
    finish_reason: str = "stop"
    """The server's own reason: stop, tool_calls, length, ..."""
    raw_text: str = ""
    prompt_tokens: int | None = None
    sampled_tokens: int | None = None


ManagedState = dict[str, Any] | Callable[[], dict[str, Any]] | None
"""{"nodes": [...]} as atroposlib's ManagedServer gives it, or a function that makes that; None without tokens."""


class Conversation(Protocol):
    """One rollout's exchange with the model; append-only between restarts."""

    def append(self, messages: Sequence[Message]) -> None:
        """Add what came after the last sampled turn: tool results, user messages."""

    def restart(self, messages: Sequence[Message]) -> None:
        """Begin a new segment whose prompt is this (truncated) view."""

    async def sample(self, sampling: Sampling) -> ModelTurn:
        """Ask for the next assistant turn; the turn becomes part of the conversation."""

    def prompt_tokens(self) -> int | None:
        """Exact length of the next prompt, or None when the server does not let us know."""

    def segments(self) -> list[Segment]:
        """Training data so far; empty when the server gives no tokens."""

    def state(self) -> ManagedState:
        """`AgentResult.managed_state` as the rollout ended, or what makes it: few ask for it."""


@runtime_checkable
class ModelServer(Protocol):
    """Where conversations are opened; shared by all rollouts."""

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Conversation:
        """Start a conversation whose first prompt is these messages."""

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int | None:
        """Length of a prompt of these messages, or None without a tokenizer."""


@dataclass(frozen=True)
class WeightsSpan:
    """Sampled tokens `[start, end)` of one call and the weights that sampled them."""

    version: str
    start: int
    end: int


@dataclass
class Segment:
    """A prefix-stable stretch of one rollout, ready for a trainer. All three lists have the same length."""

    tokens: list[int]
    masks: list[int]
    """-100 at prompt and glue positions, the token itself where the model sampled it and it is trained here."""
    logprobs: list[float]
    """1.0 at masked positions, the sampled logprob elsewhere."""
