"""Calls to Modal's SDK: each has a time limit, and each kind of failure has a type.

The SDK retries by itself for a while, and a throttled call for ever unless MODAL_MAX_THROTTLE_WAIT says otherwise; here
the time limit of each call ends both, so that nothing depends on the environment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from grpclib.exceptions import GRPCError, StreamTerminatedError
from modal import exception

from sandbox_pool.errors import SandboxError

LOG_IN = "log in with `modal token new`, or set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"


class ModalFault(SandboxError):
    """Modal refused, and why."""


class ModalMissing(ModalFault):
    """Modal does not have what was asked for."""


class ModalExists(ModalFault):
    """There is a running sandbox of this name already."""


class ModalUnanswered(ModalFault):
    """No clear answer: what was asked for may or may not have happened."""


SDK_ERRORS: tuple[type[BaseException], ...] = (exception.Error, GRPCError, StreamTerminatedError, OSError)
_UNANSWERED: tuple[type[BaseException], ...] = (
    exception.ServiceError,
    exception.InternalError,
    exception.ConnectionError,
    exception.TimeoutError,
    exception.ClientClosed,
    StreamTerminatedError,
    OSError,
)


async def ask(what: str, call: Awaitable[Any], timeout_s: float) -> Any:
    """The answer to one call; a failure or timeout raises a `ModalFault`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await call
    except TimeoutError as error:
        raise ModalUnanswered(
            f"{what}: no answer in {timeout_s:g} s; Modal is not reachable or is throttling this workspace"
        ) from error
    except SDK_ERRORS as error:
        raise fault(what, error) from error


def fault(what: str, error: BaseException) -> ModalFault:
    """The `ModalFault` for an exception of the SDK."""
    text = f"{what}: {type(error).__name__}: {str(error).strip() or 'no reason given'}"
    if isinstance(error, exception.NotFoundError):
        return ModalMissing(text)
    if isinstance(error, exception.AlreadyExistsError):
        return ModalExists(text)
    if isinstance(error, exception.AuthError):
        return ModalFault(f"{text}; {LOG_IN}")
    if isinstance(error, exception.ResourceExhaustedError):
        return ModalFault(f"{text}; this workspace has no more room or rate: fewer max_hosts, or a larger plan")
    return (ModalUnanswered if isinstance(error, _UNANSWERED) else ModalFault)(text)
