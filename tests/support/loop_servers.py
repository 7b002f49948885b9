"""Scripted servers and tools for tests of the loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from agent_loop.model.contract import Conversation, Message, ModelTurn, Sampling, Segment, ToolSchema
from agent_loop.records.record import AgentResult, RolloutRecord
from agent_loop.turn.tool_call import MALFORMED_NAME, ToolCallRecord


def tool(name: str = "terminal", required: Sequence[str] = ("command",), **properties: Any) -> ToolSchema:
    """A tool schema; `terminal(command)` unless told otherwise."""
    shape = properties or {"command": {"type": "string"}}
    parameters = {"type": "object", "properties": shape, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}


LS = {"command": "ls"}


def call(name: str = "terminal", arguments: Any = LS, **more: Any) -> ToolCallRecord:
    """A call as a parser gives it."""
    return ToolCallRecord(name, arguments, **more)


def calls(*made: ToolCallRecord, content: str = "", malformed: Sequence[str] = (), **more: Any) -> ModelTurn:
    """A turn with tool calls, and with markup that cannot be read: one sentence for each piece of it."""
    reason = more.pop("finish_reason", "tool_calls")
    return ModelTurn(content, (*made, *_unread(malformed)), finish_reason=reason, **more)


def says(content: str, malformed: Sequence[str] = (), **more: Any) -> ModelTurn:
    """A turn without calls, or with nothing but markup that cannot be read."""
    return ModelTurn(content, _unread(malformed), **more)


def _unread(sentences: Sequence[str]) -> tuple[ToolCallRecord, ...]:
    return tuple(ToolCallRecord(MALFORMED_NAME, error=sentence) for sentence in sentences)


def record_of(result: AgentResult, rollout_id: str = "r", **more: Any) -> RolloutRecord:
    """The record that stores a result."""
    record = RolloutRecord(rollout_id, "g", "e", "i", outcome="", trainable=False, messages=[], **more)
    result.fill(record)
    return record


Step = ModelTurn | Exception | Callable[[Sequence[Message]], ModelTurn]


class ScriptedConversation:
    """Plays the server's script; keeps what it was given."""

    def __init__(self, server: ScriptedServer, messages: Sequence[Message]) -> None:
        self._server = server
        self.view = list(messages)
        self.prompts: list[list[Message]] = []
        self.samplings: list[Sampling] = []
        self.restarts = 0

    def append(self, messages: Sequence[Message]) -> None:
        self.view.extend(messages)

    def restart(self, messages: Sequence[Message]) -> None:
        self.view = list(messages)
        self.restarts += 1

    async def sample(self, sampling: Sampling) -> ModelTurn:
        self.prompts.append(list(self.view))
        self.samplings.append(sampling)
        if self._server.latency_s:
            await asyncio.sleep(self._server.latency_s)
        step = self._server.next_step()
        if isinstance(step, Exception):
            raise step
        turn = step(self.view) if callable(step) else step
        self.view.append({"role": "assistant", "content": turn.content})
        return turn

    def prompt_tokens(self) -> int | None:
        return None

    def segments(self) -> list[Segment]:
        return []

    def state(self) -> dict[str, Any] | None:
        return None


class ScriptedServer:
    """A `ModelServer` that plays turns in order; the last one repeats for ever if `repeat` is set."""

    def __init__(self, *script: Step, repeat: bool = False, latency_s: float = 0.0) -> None:
        self._script = list(script)
        self._repeat = repeat
        self.latency_s = latency_s
        self.conversations: list[ScriptedConversation] = []

    def next_step(self) -> Step:
        if self._repeat and len(self._script) == 1:
            return self._script[0]
        return self._script.pop(0)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Conversation:
        self.conversations.append(ScriptedConversation(self, messages))
        return self.conversations[-1]

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int | None:
        return None


def user(text: str = "do it") -> list[Message]:
    """A conversation of one user message."""
    return [{"role": "user", "content": text}]


async def echo(name: str, arguments: dict[str, Any], task_id: str) -> str:
    """A tool handler that says what it was asked."""
    return json.dumps({"output": f"{name} {json.dumps(arguments, sort_keys=True)}", "exit_code": 0})


def assert_paired(messages: Sequence[Message]) -> None:
    """Every call has exactly one tool message, right behind its assistant message, and ids are unique."""
    seen: set[str] = set()
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            assert message["tool_call_id"] in waiting, "orphan tool message"
            waiting.remove(message["tool_call_id"])
            continue
        assert not waiting, f"calls without a result: {waiting}"
        waiting = [item["id"] for item in message.get("tool_calls", ())]
        assert all(waiting), "a call without an id"
        assert not seen & set(waiting), "an id twice"
        assert len(set(waiting)) == len(waiting), "an id twice in a turn"
        seen |= set(waiting)
    assert not waiting, f"calls without a result: {waiting}"
