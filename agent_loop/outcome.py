"""How a rollout ended, and whether the policy may be trained on it.

The split is policy against infrastructure: what the policy did (or failed to do) within its limits is trainable; what
happened to it is not. A deadline counts as infrastructure, because wall time depends on load as much as on the policy.
"""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """The end of a rollout. Values are what `RolloutRecord.outcome` stores."""

    FINISHED = "finished"
    """The model gave a final answer without a tool call."""
    MAX_TURNS = "max_turns"
    MAX_TOOL_CALLS = "max_tool_calls"
    """The model asked for a call beyond `max_tool_calls`."""
    MAX_SAMPLED_TOKENS = "max_sampled_tokens"
    """The sampled-token budget of the rollout is used up."""
    LENGTH = "length"
    """A turn was cut off by its own token limit."""
    CONTEXT_OVERFLOW = "context_overflow"
    """The conversation no longer fits `max_context_tokens`, however much of it is shortened or dropped."""
    AGENT_FAULT = "agent_fault"
    """The agent destroyed its own workspace or slot. It counts as a failure, with a score of 0: were it left out of
    training, destroying would be a way out of a failing rollout."""
    DEADLINE = "deadline"
    API_ERROR = "api_error"
    SANDBOX_LOST = "sandbox_lost"
    CANCELLED = "cancelled"

    @property
    def trainable(self) -> bool:
        """Whether the rollout shows what the policy does, rather than what happened to it."""
        return self not in _UNTRAINABLE


_UNTRAINABLE = frozenset({Outcome.DEADLINE, Outcome.API_ERROR, Outcome.SANDBOX_LOST, Outcome.CANCELLED})
