"""The small conversations that a template is probed with: every content is a word that occurs nowhere else."""

from __future__ import annotations

from collections.abc import Mapping

from agent_loop.model import Message, ToolSchema

TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Xd1probe",
        "parameters": {"type": "object", "properties": {"a": {"type": "string", "description": "Xd2probe"}}},
    },
}
SYSTEM: Message = {"role": "system", "content": "Xs0probe"}
USER: Message = {"role": "user", "content": "Xu0probe"}
THOUGHT = "Xt0probe"


def result(index: int) -> Message:
    """A tool result with a word of its own."""
    return {"role": "tool", "tool_call_id": f"call_probe_{index}", "name": "probe_tool", "content": f"Xr{index}probe"}


def call_turn(*indexes: int, reasoning: str | None = None) -> Message:
    """An assistant turn with calls."""
    calls = [
        {
            "id": f"call_probe_{index}",
            "type": "function",
            "function": {"name": "probe_tool", "arguments": {"a": f"Xa{index}probe"}},
        }
        for index in indexes
    ]
    turn: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    return turn | {"reasoning_content": reasoning} if reasoning else turn


def answer_turn(text: str) -> Message:
    """An assistant turn without calls."""
    return {"role": "assistant", "content": text}


PENDING: Mapping[str, tuple[Message, ...]] = {
    "one result": (result(7),),
    "two results": (result(7), result(8)),
    "a user message": (USER,),
}
HISTORIES: tuple[tuple[Message, ...], ...] = (
    (USER,),
    (SYSTEM, USER),
    (SYSTEM, USER, call_turn(1), result(1), answer_turn("Xw1probe"), USER),
    (SYSTEM, USER, call_turn(1, 2, reasoning=THOUGHT), result(1), result(2), call_turn(3), result(3)),
)
