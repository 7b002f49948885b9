"""Token-exact conversations: the ids of a rollout are kept, sent as ids, and only ever appended to.

What the model sampled is never tokenized again and never rendered; what comes after it is the chat template's glue,
written once. Restarting from a shorter view opens a new segment. Over all segments every sampled token is trained
exactly once, with the logprob it was sampled with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from agent_loop.fairness import wait_in_line
from agent_loop.model.backends.backend import Generation, TokenBackend
from agent_loop.model.contract import Message, ModelTurn, Sampling, Segment, ToolSchema
from agent_loop.model.on_tape import generated
from agent_loop.model.tokens.ledger import Ledger, Vocabulary
from agent_loop.model.tokens.template import ChatTemplate
from agent_loop.records.record import Piece, SampledCall
from agent_loop.turn.tool_call import parsed_calls
from tool_parsers import Tools


class TurnParser(Protocol):
    """What is used of a tool_parsers parser."""

    def parse(self, text: str, tools: Any = None, start: Any = "content") -> Any:
        """Raw text of one turn -> content, reasoning, calls, errors. `tools` were read by `tool_parsers.Tools`."""


class Recorder:
    """A model server whose conversations are recorded token by token."""

    def __init__(
        self, backend: TokenBackend, template: ChatTemplate, parser: TurnParser, *, write_tools: bool = True
    ) -> None:
        """`write_tools=False` keeps schemas out of the template, for prompts that describe the tools themselves."""
        self._backend = backend
        self._template = template
        self._vocabulary = Vocabulary(template.tokenizer)
        self._parser = parser
        self._write_tools = write_tools

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> RecordedConversation:
        """Start a conversation whose first prompt is these messages."""
        return RecordedConversation(
            self._backend, self._template, self._vocabulary, self._parser, messages, tools, self._write_tools
        )

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int:
        """Exact length of a prompt of these messages."""
        return len(self._template.prompt_ids(messages, tools if self._write_tools else ()))

    async def close(self) -> None:
        """Drop the backend's connections."""
        await self._backend.close()


class RecordedConversation:
    """One rollout's exchange, as ids."""

    def __init__(
        self,
        backend: TokenBackend,
        template: ChatTemplate,
        vocabulary: Vocabulary,
        parser: TurnParser,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        write_tools: bool,
    ) -> None:
        self._backend = backend
        self._template = template
        self._vocabulary = vocabulary
        self._parser = parser
        self._parsed_tools = Tools.of(list(tools) or None)
        self._written_tools = list(tools) if write_tools else []
        self._ledger = Ledger()
        self._history: list[Message] = []
        """The prompt's messages, and for templates with whole glue those that followed, up to the last sampled turn."""
        self._turn: ModelTurn | None = None
        self._last_id: int | None = None
        self._pending: list[Message] = []
        self._glue: list[int] | None = None
        self.restart(messages)

    def append(self, messages: Sequence[Message]) -> None:
        """Add what came after the last sampled turn; before the first one it lengthens the prompt."""
        if self._turn is None:
            self.restart([*self._history, *messages])
            return
        if any(m.get("role") == "assistant" for m in messages):
            raise ValueError("assistant turns are sampled, not appended: restart from a view that has them")
        self._pending.extend(messages)
        self._glue = None

    def restart(self, messages: Sequence[Message]) -> None:
        """Begin a new segment whose prompt is this view."""
        self._ledger.begin(self._template.prompt_ids(messages, self._written_tools))
        self._history = list(messages)
        self._turn, self._last_id, self._pending, self._glue = None, None, [], None

    def prompt_tokens(self) -> int:
        """Exact length of the next prompt."""
        return len(self._ledger.tokens) + len(self._glue_ids())

    async def sample(self, sampling: Sampling) -> ModelTurn:
        """Ask for the next turn. A failed request changes nothing, so it can be made again."""
        if self._turn is not None and not self._pending:
            raise ValueError("nothing came after the last turn: there is nothing to answer")
        glue = self._glue_ids()
        prompt = self._ledger.tokens + glue
        began = time.monotonic()
        after = 0 if self._turn is None else len(self._ledger.tokens)
        generation = await generated(
            after,
            glue if after else prompt,
            sampling,
            lambda: self._backend.generate(prompt, sampling, stop_ids=sorted(self._template.given_stop_ids)),
        )
        duration_s = time.monotonic() - began
        await wait_in_line()
        self._ledger.extend(glue)
        self._ledger.sampled(
            generation.token_ids,
            generation.logprobs,
            sent=prompt,
            finish_reason=generation.finish_reason,
            duration_s=duration_s,
            weights_version=generation.weights_version,
            weights_spans=generation.weights_spans,
            temperature=sampling.extra_body.get("temperature", sampling.temperature),
            entropies=generation.entropies,
        )
        return self._take_turn(generation, prompt)

    def segments(self) -> list[Segment]:
        """Training data so far."""
        return self._ledger.segments()

    def sampled_calls(self) -> list[SampledCall]:
        """Every request as it went over the wire, for `RolloutRecord.sampled_calls`."""
        return self._ledger.sampled_calls()

    def pieces(self) -> dict[str, Piece]:
        """What each id of the segments stands for, for `RolloutRecord.pieces`."""
        return self._vocabulary.pieces(token for segment in self._ledger.segments() for token in segment.tokens)

    def state(self) -> Callable[[], dict[str, Any]]:
        """Makes the segments in the shape of atroposlib's ManagedServer; writing them as text takes its time."""
        return self._managed_state

    def _glue_ids(self) -> list[int]:
        """Ids that put the pending messages behind the last turn; worked out once per turn."""
        if self._turn is None or not self._pending:
            return []
        if self._glue is None:
            self._pending = _named(self._pending, self._turn)
            self._glue = self._template.glue_ids(self._history, self._pending, self._written_tools, self._last_id)
        return self._glue

    def _managed_state(self) -> dict[str, Any]:
        reasons = self._ledger.finish_reasons()
        return {
            "nodes": [
                {
                    "full_text": self._template.decode(segment.tokens),
                    "tokens": segment.tokens,
                    "masked_tokens": segment.masks,
                    "logprobs": segment.logprobs,
                    "metadata": {"finish_reason": reasons[index]},
                }
                for index, segment in enumerate(self.segments())
            ]
        }

    def _take_turn(self, generation: Generation, prompt: list[int]) -> ModelTurn:
        if self._turn is not None and self._template.traits.glue == "whole":
            self._history += [_as_message(self._turn, self._pending), *self._pending]
        ids = generation.token_ids
        self._last_id = ids[-1] if ids else None
        self._pending, self._glue = [], None
        spoken = ids[:-1] if self._last_id in self._template.stop_ids else ids
        text = self._template.decode(spoken)
        start = "reasoning" if self._template.ends_in_thinking(prompt) else "content"
        parsed = self._parser.parse(text, tools=self._parsed_tools, start=start)
        self._turn = as_turn(parsed, text, generation, len(prompt))
        return self._turn


def as_turn(parsed: Any, text: str, generation: Generation, prompt_tokens: int) -> ModelTurn:
    """A parse as the loop wants it."""
    return ModelTurn(
        content="\n".join(part for part in (parsed.content, parsed.trailing) if part),
        calls=parsed_calls(parsed),
        reasoning=parsed.reasoning or None,
        finish_reason=generation.finish_reason,
        raw_text=text,
        prompt_tokens=prompt_tokens,
        sampled_tokens=len(generation.token_ids),
    )


def _named(pending: Sequence[Message], turn: ModelTurn) -> list[Message]:
    """Tool results with the name of the call they answer, which some templates write."""
    names = [call.name for call in turn.calls]
    named: list[Message] = []
    for index, message in enumerate(pending):
        if message.get("role") == "tool" and "name" not in message and index < len(names):
            message = message | {"name": names[index]}
        named.append(message)
    return named


def _as_message(turn: ModelTurn, pending: Sequence[Message]) -> Message:
    """The sampled turn as a message, for templates whose glue depends on earlier turns."""
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.reasoning:
        message["reasoning_content"] = turn.reasoning
    results = [m for m in pending if m.get("role") == "tool"]
    arguments = [call.raw_arguments or {} for call in turn.calls]
    if results:
        message["tool_calls"] = [
            {
                "id": str(result.get("tool_call_id") or f"call_{index}"),
                "type": "function",
                "function": {
                    "name": str(result.get("name") or "tool"),
                    "arguments": arguments[index] if index < len(arguments) else {},
                },
            }
            for index, result in enumerate(results)
        ]
    return message
