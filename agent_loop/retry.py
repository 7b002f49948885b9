"""Another try for transport faults, and only for those: exponential backoff with full jitter, or what the server asks.

A refusal (4xx), a nonsense answer and a prompt that is too long would end the same way again and are raised at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from agent_loop.model import ModelUnavailable

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how patiently to ask again."""

    attempts: int = 5
    """Requests in all; 1 is no retry."""
    base_s: float = 0.5
    cap_s: float = 20.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError("attempts must be at least 1")

    def pause_s(self, failed: int, jitter: float, asked_s: float | None = None) -> float:
        """Pause after the n-th failure, for a jitter in [0, 1); at least what the server asked for, up to the cap."""
        ceiling = min(self.cap_s, self.base_s * 2.0 ** min(failed - 1, 30))
        return max(ceiling * jitter, min(asked_s or 0.0, self.cap_s))


async def with_retries(
    ask: Callable[[], Awaitable[T]],
    policy: RetryPolicy,
    jitter: Callable[[], float] = random.random,
    on_failure: Callable[[], None] = lambda: None,
) -> T:
    """Call `ask` until it answers; `ModelUnavailable` of the last attempt is raised. `on_failure` counts the others."""
    failed = 0
    while True:
        try:
            return await ask()
        except ModelUnavailable as error:
            failed += 1
            if failed >= policy.attempts:
                raise
            on_failure()
            await asyncio.sleep(policy.pause_s(failed, jitter(), error.retry_after_s))
