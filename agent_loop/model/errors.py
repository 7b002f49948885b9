"""What client libraries raise -> `ModelUnavailable` (try again), `ModelRefused`, `ContextTooLong` or `ModelError`."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from agent_loop.model.contract import ContextTooLong, ModelError, ModelRefused, ModelUnavailable

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


_TOO_LONG = re.compile(
    r"context[_ ](length|window|size)|maximum context|too many tokens"
    r"|(prompt|input)\b.{0,40}\btoo long|exceeds? the (available|max)",
    re.IGNORECASE | re.DOTALL,
)


def translate(error: Exception) -> ModelError:
    """The model error that an exception of a client library stands for."""
    if isinstance(error, ModelError):
        return error
    said = f"{type(error).__name__}: {error}"[:2000]
    status = status_of(error)
    if status is not None:
        translated = _by_status(status, said)
        if isinstance(translated, ModelUnavailable):
            translated.retry_after_s = _retry_after(error)
        return translated
    if (last := getattr(error, "last_attempt", None)) is not None:
        return _after_retries(last.exception(), said)
    if isinstance(error, OSError) or _is_connection_fault(error):
        return ModelUnavailable(said)
    return ModelError(said)


def _after_retries(cause: BaseException | None, said: str) -> ModelError:
    """tenacity's RetryError, as atroposlib raises it: why it failed, but never worth yet another try."""
    inner = translate(cause) if isinstance(cause, Exception) else ModelError(said)
    return ModelError(f"{said} <- {inner}") if isinstance(inner, ModelUnavailable) else inner


def status_of(error: Exception) -> int | None:
    """HTTP status that an exception carries (openai: status_code, aiohttp: status)."""
    for name in ("status_code", "status"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None


def _retry_after(error: Exception) -> float | None:
    """Seconds of a Retry-After header (openai: error.response.headers, aiohttp: error.headers)."""
    headers = getattr(getattr(error, "response", error), "headers", None)
    try:
        seconds = float(headers.get("Retry-After"))  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return None  # absent, or a date
    return seconds if 0 <= seconds < 86_400 else None


def _by_status(status: int, said: str) -> ModelError:
    if status == 429 or status >= 500:
        return ModelUnavailable(said)
    if status in (400, 413, 422) and _TOO_LONG.search(said):
        return ContextTooLong(said)
    return ModelRefused(said)


def _is_connection_fault(error: Exception) -> bool:
    """By name: neither library need be imported, or even installed, to know its errors."""
    kinds = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(error).__mro__}
    return bool(kinds & {("openai", "APIConnectionError"), ("aiohttp", "ClientError"), ("httpx", "TransportError")})
