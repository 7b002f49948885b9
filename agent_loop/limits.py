"""Limits of a rollout and the order in which they are checked. Configuration only: `rollout.py` enforces.

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
8. no calls                  -> `finished` (markup that could not be read is a call with an error, answered like one)
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

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of one rollout; None is no limit."""

    max_turns: int = 30
    max_tool_calls: int | None = None
    max_sampled_tokens: int | None = None
    tool_timeout_s: float | None = 600.0
    """Per call. Tools have shorter limits of their own; this one catches what hangs."""
    turn_timeout_s: float | None = None
    """Sampling and tools of one turn together."""
    rollout_timeout_s: float | None = None
    max_parallel_calls: int = 16
    """Calls of one turn that run at the same time."""
    cancel_grace_s: float = 10.0
    """How long a stopped call may take to clean up before it is left behind."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_parallel_calls"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("max_tool_calls", "max_sampled_tokens"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative")
        for name in ("tool_timeout_s", "turn_timeout_s", "rollout_timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive")
