"""Our rollouts as verifiers' traces: messages in its words, every sampled call with the ids of the ledger."""

from __future__ import annotations

from typing import Any

from verifiers.v1.dialects.chat import FINISH_REASONS, parse_message, parse_tools
from verifiers.v1.graph import prepare_turn
from verifiers.v1.types import Response, TurnTokens, Usage

from agent_loop.model.contract import Message
from agent_loop.records.record import RolloutRecord
from agent_loop.turn.messages import arguments_text


def commit(trace: Any, record: RolloutRecord, model: str) -> None:
    """Write a rollout into the trace, call by call, with the ids as the model saw them.

    A trace is one growing conversation: of a rollout whose context was truncated it gets the last segment.
    """
    tools = parse_tools(record.tools)
    messages = [as_vf(message) for message in record.messages]
    for place, number in enumerate(record.sampled_by):
        call = None if number is None else record.sampled_calls[number]
        if call is None or call.segment != len(record.segments) - 1:
            continue
        turn = prepare_turn(trace, messages[:place], tools)
        tokens = TurnTokens(
            prompt_ids=call.prompt_ids, completion_ids=call.sampled_ids, completion_logprobs=call.logprobs
        )
        turn.commit(
            Response(
                id="",
                created=0,
                model=model,
                message=messages[place],
                finish_reason=call.finish_reason if call.finish_reason in FINISH_REASONS else "stop",
                usage=Usage(prompt_tokens=len(call.prompt_ids), completion_tokens=len(call.sampled_ids)),
                tokens=tokens,
            )
        )


def as_vf(message: Message) -> Any:
    """A chat message as verifiers has it; arguments are text there."""
    calls = [
        {**call, "function": {**call["function"], "arguments": arguments_text(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return parse_message({**message, "tool_calls": calls})
