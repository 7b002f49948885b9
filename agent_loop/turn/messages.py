"""How sampled turns become chat messages: ids that are unique in the rollout, calls and results that always pair."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agent_loop.model.contract import Message, ModelTurn
from agent_loop.records.tape import random_name
from agent_loop.turn.tool_call import MALFORMED_NAME, ToolCallRecord

MAX_DEPTH = 100
"""Levels of nesting that are stored."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class CallIds:
    """Ids of one rollout's calls: the model's own where they are usable, fresh ones where missing or repeated."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def claim(self, given: str) -> str:
        """The given id if no call of the rollout has it yet, else a fresh one."""
        call_id = given if given and given not in self._seen else f"call_{random_name(12)}"
        self._seen.add(call_id)
        return call_id


def settle(turn: ModelTurn, ids: CallIds) -> ModelTurn:
    """The turn with calls of the loop's own, each with a unique id."""
    return replace(turn, calls=tuple(replace(call, call_id=ids.claim(call.call_id)) for call in turn.calls))


def assistant_message(turn: ModelTurn) -> Message:
    """The message of a settled turn. Reasoning has its own key unless the content already holds it."""
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.reasoning and turn.reasoning not in turn.content:
        message["reasoning_content"] = turn.reasoning
    if turn.calls:
        message["tool_calls"] = [_tool_call(call) for call in turn.calls]
    return message


def tool_message(call: ToolCallRecord) -> Message:
    return {"role": "tool", "tool_call_id": call.call_id, "name": _sendable_name(call), "content": call.text}


def arguments_text(raw: Any) -> str:
    """Arguments as the history keeps them: what the model wrote when that is a JSON object, else a JSON object with it.

    Servers parse the arguments of earlier calls and refuse the whole request over one that is not JSON.
    """
    if isinstance(raw, str):
        try:
            if isinstance(json.loads(raw), dict):
                return raw
        except (ValueError, RecursionError):
            pass
        return json.dumps({"unparsed_arguments": raw}, ensure_ascii=False)
    if raw is None:
        return "{}"
    try:
        text = json.dumps(raw, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return json.dumps({"unparsed_arguments": shown(raw)[:10_000]}, ensure_ascii=False)
    return text if isinstance(raw, dict) else json.dumps({"unparsed_arguments": raw}, ensure_ascii=False)


def storable(value: Any, depth: int = 0) -> Any:
    """A value as every JSON writer takes it: what a model wrote must never keep a rollout from being stored."""
    if depth > MAX_DEPTH:
        return "(nested deeper)"
    if isinstance(value, str):
        return sendable(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {sendable(str(key)): storable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [storable(item, depth + 1) for item in value]
    return sendable(shown(value))


def shown(value: Any) -> str:
    """`repr` that very deep values cannot break."""
    try:
        return repr(value)
    except RecursionError:
        return f"({type(value).__name__}, nested too deeply)"


def sendable(text: str) -> str:
    """Text that can be sent as UTF-8: halves of surrogate pairs become replacement characters."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _sendable_name(call: ToolCallRecord) -> str:
    """The call's name if a server would accept it as one; a name of 10,000 characters is not repeated to the model."""
    return call.name if _NAME.fullmatch(call.name) else MALFORMED_NAME


def _tool_call(call: ToolCallRecord) -> dict[str, Any]:
    function = {"name": _sendable_name(call), "arguments": sendable(arguments_text(call.raw_arguments))}
    return {"id": call.call_id, "type": "function", "function": function}
