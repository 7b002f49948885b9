"""Limits of a rollout and the order in which they are checked. Configuration only: `loop.py` enforces.

Order of checks. Before a turn:

1. rollout deadline          -> `deadline`
2. `max_turns`               -> `max_turns`
3. `max_sampled_tokens`      -> `max_sampled_tokens`
4. context fit (truncation)  -> `context_overflow`

While the model samples:

5. rollout or turn deadline  -> `deadline`
6. transport faults after all retries, refusals -> `api_error`; prompt refused as too long -> truncate further, else
   `context_overflow`

After the model answered:

7. finish reason `length`    -> `max_sampled_tokens` when the rollout's budget made the cut, else `length`
8. no calls                  -> `finished` (markup that could not be read is a call with an error, answered like one).
   While a process runs that was started with notify_on_complete, its end is waited for first, until the deadline of the
   turn or `tool_timeout_s`, and the model gets another turn to hear of it. With a `user`, they are asked then: their
   answer is another turn's prompt, and none is `finished`
9. calls beyond `max_tool_calls` are answered "not run", those within it run -> `max_tool_calls`

While tools run:

10. deadline of the call (`tool_timeout_s`), then of the turn: the call ends as `timeout`, later ones are not run, and
    the model is told
11. rollout deadline         -> running calls are stopped, the rest is not run, `deadline`
12. a lost sandbox           -> other calls are stopped, `sandbox_lost`

Cancellation is not a check: it interrupts wherever the rollout is, stops running calls, and ends it as `cancelled`.
Whatever the end, every tool call in the trajectory has its tool message.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Limits(BaseModel):
    """Limits of one rollout; None is no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_turns: int = Field(default=30, ge=1)
    max_tool_calls: int | None = Field(default=None, ge=0)
    max_sampled_tokens: int | None = Field(default=None, ge=0)
    tool_timeout_s: float | None = Field(default=600.0, gt=0)
    """Per call. Tools have shorter limits of their own; this one catches what hangs."""
    turn_timeout_s: float | None = Field(default=None, gt=0)
    """Sampling and tools of one turn together."""
    rollout_timeout_s: float | None = Field(default=None, gt=0)
    max_parallel_calls: int = Field(default=16, ge=1)
    """Calls of one turn that run at the same time."""
    cancel_grace_s: float = Field(default=10.0, ge=0)
    """How long a stopped call may take to clean up before it is left behind."""
