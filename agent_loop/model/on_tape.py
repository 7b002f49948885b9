"""Requests to a model as a tape has them: see `agent_loop.records.tape`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from agent_loop.model.backends.backend import ITEM, Generation
from agent_loop.model.contract import (
    ContextTooLong,
    ModelError,
    ModelRefused,
    ModelTurn,
    ModelUnavailable,
    Sampling,
    WeightsSpan,
)
from agent_loop.model.errors import translate
from agent_loop.records.tape import exchange
from agent_loop.turn.tool_call import ToolCallRecord

_ERRORS = {kind.__name__: kind for kind in (ModelError, ModelUnavailable, ModelRefused, ContextTooLong)}


async def generated(
    after: int, ids: Sequence[int], sampling: Sampling, ask: Callable[[], Awaitable[Generation]]
) -> Generation:
    """What a token server sampled. `after` tokens of the prompt were in the last request or sampled by it."""
    return await exchange(
        "model",
        lambda: {"after": after, "ids": list(ids), **_sampling(sampling)},
        ask,
        asdict,
        _generation,
        _stored_error,
        _error,
    )


async def completed(
    request: Callable[[], Mapping[str, Any]], sampling: Sampling, ask: Callable[[], Awaitable[ModelTurn]]
) -> ModelTurn:
    """What a chat server answered."""
    return await exchange(
        "chat", lambda: {**request(), **_sampling(sampling)}, ask, asdict, _turn, _stored_error, _error
    )


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """What decides the answer; which item it is matters to the stand-in alone, and nobody plays one again."""
    extra = {key: value for key, value in sampling.extra_body.items() if key != ITEM}
    return {
        key: value for key, value in (asdict(sampling) | {"extra_body": extra}).items() if value not in (None, (), {})
    }


def _generation(stored: dict[str, Any]) -> Generation:
    spans = tuple(WeightsSpan(**span) for span in stored["weights_spans"])
    return Generation(**stored | {"weights_spans": spans})


def _turn(stored: dict[str, Any]) -> ModelTurn:
    calls = tuple(
        ToolCallRecord(**call | {"repairs": tuple(call["repairs"]), "nested": tuple(call["nested"])})
        for call in stored["calls"]
    )
    return ModelTurn(**stored | {"calls": calls})


def _stored_error(error: BaseException) -> dict[str, Any] | None:
    if not isinstance(error, Exception):
        return None
    known = translate(error)
    stored: dict[str, Any] = {"kind": type(known).__name__, "message": str(known)}
    if isinstance(known, ModelUnavailable):
        stored["retry_after_s"] = known.retry_after_s
    return stored


def _error(stored: Mapping[str, Any]) -> ModelError:
    error = _ERRORS.get(stored["kind"], ModelError)(stored["message"])
    if isinstance(error, ModelUnavailable):
        error.retry_after_s = stored["retry_after_s"]
    return error
