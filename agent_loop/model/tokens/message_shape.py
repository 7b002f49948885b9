"""Messages in the shape that a chat template expects: arguments, thinking, parallel calls, ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

from agent_loop.model.contract import Message

ReasoningKey = Literal["reasoning_content", "reasoning", "thinking", ""]


@dataclass(frozen=True)
class MessageShape:
    """What a template expects of messages; found by probing."""

    arguments: Literal["dict", "string"] = "dict"
    """Tool-call arguments as a mapping, or as JSON text."""
    reasoning_key: ReasoningKey = "reasoning_content"
    """The key whose text the template writes as thinking; empty when it writes none."""
    parallel_calls: bool = True
    """Whether an assistant message may carry several calls; otherwise they are shown one after the other."""
    short_call_ids: bool = False
    """Whether call ids must be nine letters or digits (Mistral)."""


def shape_messages(messages: Sequence[Message], shape: MessageShape) -> list[Message]:
    """The same conversation as this template wants it."""
    shaped: list[Message] = []
    for message in messages if shape.parallel_calls else _one_call_each(messages):
        role = message.get("role")
        if role == "assistant":
            shaped.append(_assistant(message, shape))
        elif role == "tool" and shape.short_call_ids:
            shaped.append(message | {"tool_call_id": short_id(str(message.get("tool_call_id", "")))})
        else:
            shaped.append(message)
    return shaped


def short_id(call_id: str) -> str:
    """Nine letters and digits that stand for a call id; ids that are already so stay as they are."""
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]


def _assistant(message: Message, shape: MessageShape) -> Message:
    shaped: Message = dict(message)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    for key in ("reasoning_content", "reasoning", "thinking"):
        shaped.pop(key, None)
    if reasoning and shape.reasoning_key:
        shaped[shape.reasoning_key] = reasoning
    if shaped.get("content") is None:
        shaped["content"] = ""
    if calls := message.get("tool_calls"):
        shaped["tool_calls"] = [_call(call, shape) for call in calls]
    else:
        shaped.pop("tool_calls", None)
    return shaped


def _call(call: dict[str, Any], shape: MessageShape) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    value = function.get("arguments")
    function["arguments"] = as_mapping(value) if shape.arguments == "dict" else _as_text(value)
    call_id = str(call.get("id") or "")
    return call | {"function": function, "id": short_id(call_id) if shape.short_call_ids else call_id}


def as_mapping(arguments: Any) -> dict[str, Any]:
    """Arguments as a mapping; text that is not a JSON object is shown under one key, as it was written."""
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
        except ValueError:
            decoded = None
        arguments = decoded if isinstance(decoded, dict) else {"arguments": arguments}
    if arguments is None:
        return {}
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Assistant turns with several calls become one turn per call, each followed by its own result."""
    split: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or []
        if message.get("role") != "assistant" or len(calls) < 2:
            split.append(message)
            continue
        results: list[Message] = []
        while position < len(messages) and messages[position].get("role") == "tool":
            results.append(messages[position])
            position += 1
        split.extend(_interleave(message, calls, results))
    return split


def _interleave(message: Message, calls: list[dict[str, Any]], results: list[Message]) -> list[Message]:
    turns: list[Message] = []
    left = list(results)
    for index, call in enumerate(calls):
        first = message if index == 0 else {"role": "assistant", "content": ""}
        turns.append(first | {"tool_calls": [call]})
        mine = [r for r in left if r.get("tool_call_id") == call.get("id")]
        left = [r for r in left if r not in mine]
        turns.extend(mine)
    return turns + left
