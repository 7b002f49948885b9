"""Every failed request becomes one of three errors here, whoever asked: chat, token servers, atroposlib's servers.

`ModelUnavailable`: try again. `ContextTooLong`: shorten the prompt. `ModelRefused`: neither would help.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from agent_loop.model.contract import ContextTooLong, ModelError, ModelRefused, ModelUnavailable

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how patiently to ask again."""

    attempts: int = 5
    """Requests in all; with 1 nothing is tried again."""
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


NOT_NOW = frozenset({408, 409, 425, 429})
"""4xx codes that ask for another try: timeout, conflict (a lock, as OpenAI uses it), too early, rate limit."""
MAY_MEAN_TOO_LONG = frozenset({400, 413, 422, 500})
"""Codes that come with a prompt beyond the context, when the body says so. 413 alone is a limit on bytes, most often a
proxy's, and says nothing of the model. 500: llama.cpp up to September 2025, and gateways."""
READ_CHARS = 2000
"""Of a body. Some servers repeat the whole prompt after their message, and a prompt may say anything."""

_TOO_LONG = re.compile(
    "|".join(
        (
            r"context[_ ](length|window|size|limit)",
            r"maximum (context|input|model|prompt|sequence) (length|len\b)",
            r"max_model_len",
            r"longer than the (model|maximum)",
            r"too many (input )?tokens",
            r"(prompt|input)\b.{0,40}\btoo (long|large)",
            r"(input|prompt|token)\b.{0,60}\bexceeds? the (configured|available|max)",
            r"reduce the length of the (messages|input|prompt)",
            r"tokens \+ .{0,4}max_new_tokens.{0,4} must be",
            r"max_tokens must be at least 1, got -",
        )
    ),
    re.IGNORECASE | re.DOTALL,
)
"""How servers say that a prompt does not fit; `tests/agent_loop/model/test_errors.py` has their sentences."""


def failure(status: int, text: str, headers: Mapping[str, str] | None = None, *, where: str = "") -> ModelError:
    """The one decision over an HTTP error: shall it be tried again, was the prompt too long, or was it refused?"""
    said = f"{where}: HTTP {status}: {text[:500]}" if where else text[:READ_CHARS]
    if status in MAY_MEAN_TOO_LONG and _TOO_LONG.search(text[:READ_CHARS]):
        return ContextTooLong(said)
    if status in NOT_NOW or status >= 500:
        later = ModelUnavailable(said)
        later.retry_after_s = _retry_after(headers)
        return later
    return ModelRefused(said)


def failure_in(error: Any, *, where: str = "") -> ModelError:
    """What the `error` field of an answer with HTTP 200 stands for; gateways answer so after they began to stream."""
    fields = error if isinstance(error, Mapping) else {"message": error}
    code = str(fields.get("code"))
    status = int(code) if code.isdecimal() and 400 <= int(code) < 600 else 400
    return failure(status, str(fields.get("message") or error), where=where)


def translate(error: Exception) -> ModelError:
    """The model error that an exception of a client library stands for."""
    if isinstance(error, ModelError):
        return error
    said = f"{type(error).__name__}: {error}"
    status = _status_of(error)
    if status is not None:
        response = getattr(error, "response", error)
        body = getattr(response, "text", None)  # openai leaves out of its message what it does not expect in a body
        said = f"{type(error).__name__}: HTTP {status}: {body}" if body and isinstance(body, str) else said
        return failure(status, said, getattr(response, "headers", None))
    if (last := getattr(error, "last_attempt", None)) is not None:
        return _after_retries(last.exception(), said)
    if isinstance(error, OSError) or _is_connection_fault(error):
        return ModelUnavailable(said[:READ_CHARS])
    return ModelError(said[:READ_CHARS])


def _after_retries(cause: BaseException | None, said: str) -> ModelError:
    """tenacity's RetryError, as atroposlib raises it: it says why, and it is not worth yet another try."""
    inner = translate(cause) if isinstance(cause, Exception) else ModelError(said)
    return ModelError(f"{said} <- {inner}") if isinstance(inner, ModelUnavailable) else inner


def _status_of(error: Exception) -> int | None:
    """HTTP status that an exception carries (openai: status_code, aiohttp: status)."""
    for name in ("status_code", "status"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None


def _retry_after(headers: Mapping[str, str] | None) -> float | None:
    try:
        seconds = float(headers["Retry-After"])  # type: ignore[index]
    except (KeyError, TypeError, ValueError):
        return None  # absent, or a date
    return seconds if 0 <= seconds < 86_400 else None


def _is_connection_fault(error: Exception) -> bool:
    """By name: neither library need be imported, or even installed, to know its errors."""
    kinds = {(kind.__module__.split(".")[0], kind.__name__) for kind in type(error).__mro__}
    return bool(kinds & {("openai", "APIConnectionError"), ("aiohttp", "ClientError"), ("httpx", "TransportError")})
