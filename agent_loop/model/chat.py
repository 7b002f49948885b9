"""Chat servers as model servers: no tokens, and the result says so.

`ChatServer` speaks to any OpenAI-compatible `/v1/chat/completions` through an `AsyncOpenAI` client, or to any
object with hermes-agent's `server.chat_completion(messages=..., n=1, ...)` (atroposlib's ServerManager, ManagedServer).
A conversation keeps the messages, sends them whole, and reads calls the server parsed; when the server parsed none,
a `TextParser` may read them from the text, so that malformed markup is not taken for a final answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from agent_loop.model.contract import (
    Conversation,
    Message,
    ModelRefused,
    ModelTurn,
    Sampling,
    Segment,
    ToolSchema,
)
from agent_loop.model.errors import failure_in, translate
from agent_loop.model.on_tape import completed
from agent_loop.turn.messages import assistant_message, sendable
from agent_loop.turn.tool_call import ToolCallRecord, parsed_calls
from tool_parsers import Parsed, get_parser

_BLOCKS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))


def extract_reasoning(message: Any) -> str | None:
    """Reasoning of an answer (object or dict): reasoning_content, reasoning, reasoning_details, think blocks."""
    for name in ("reasoning_content", "reasoning"):
        text = get(message, name)
        if isinstance(text, str) and text:
            return text
    details = get(message, "reasoning_details")
    for detail in details if isinstance(details, (list, tuple)) else ():
        text = get(detail, "text")
        if isinstance(text, str) and text:
            return text
    content = get(message, "content")
    return think_text(content) if isinstance(content, str) else None


def think_text(content: str) -> str | None:
    """The text of a leading or single think block; an unclosed block reaches to the end."""
    for opener, closer in _BLOCKS:
        start = content.find(opener)
        end = content.find(closer, max(start, 0))
        if start < 0 and end < 0:
            continue
        # A template may have put the opener into the prompt: then only the closer was sampled.
        begin = start + len(opener) if start >= 0 else 0
        text = content[begin : end if end >= 0 else len(content)].strip()
        return text or None
    return None


Completion = Callable[..., Awaitable[Any]]
TokenCounter = Callable[[Sequence[Message], Sequence[ToolSchema]], int]


class TextParser(Protocol):
    """A parser of `tool_parsers`: text -> `Parsed`."""

    def parse(self, text: str, tools: Sequence[Any] | None = None) -> Parsed:
        """Parse one sampled text; never raises."""


class ChatServer:
    """A `ModelServer` without tokens, shared by all rollouts."""

    def __init__(
        self,
        server: Any,
        model: str | None = None,
        parser: TextParser | str | None = None,
        count: TokenCounter | None = None,
    ) -> None:
        """`parser` is one of `tool_parsers` or its name; `count` must also count messages that come after others."""
        self._server = server
        self._parser = get_parser(parser) if isinstance(parser, str) else parser
        self._count = count
        self._complete = _completion_of(server, model)

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> Conversation:
        """Start a conversation; nothing is sent yet."""
        return ChatConversation(self._complete, messages, tools, self._parser, getattr(self._server, "get_state", None))

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> int | None:
        """The counter's answer, or None when none was given."""
        return self._count(messages, tools) if self._count else None


class ChatConversation:
    """One rollout's messages; each sample sends them all."""

    def __init__(
        self,
        complete: Completion,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema],
        parser: TextParser | None,
        get_state: Callable[[], Any] | None,
    ) -> None:
        self._complete = complete
        self._messages = list(messages)
        self._tools = list(tools)
        self._parser = parser
        self._get_state = get_state
        self._turn: ModelTurn | None = None
        """The last sampled turn, until what follows tells the ids that its calls go by."""

    def append(self, messages: Sequence[Message]) -> None:
        """Add messages to the next prompt."""
        if self._turn is not None:
            self._messages.append(assistant_message(_with_ids(self._turn, messages)))
            self._turn = None
        self._messages.extend(messages)

    def restart(self, messages: Sequence[Message]) -> None:
        """Replace the prompt by a truncated view."""
        self._messages = list(messages)
        self._turn = None

    async def sample(self, sampling: Sampling) -> ModelTurn:
        """One completion. Faults are raised as `ModelError`; the conversation is then as it was before."""
        self.append(())
        messages = list(self._messages)

        async def ask() -> ModelTurn:
            try:
                return self._read(await self._complete(messages=messages, **self._options(sampling)))
            except Exception as error:  # whatever a client library raises becomes one of our three kinds of model error
                raise translate(error) from error

        self._turn = await completed(lambda: {"messages": messages, "tools": self._tools}, sampling, ask)
        return self._turn

    def prompt_tokens(self) -> int | None:
        """Unknown: the server templates the messages."""
        return None

    def segments(self) -> list[Segment]:
        """None are known."""
        return []

    def state(self) -> dict[str, Any] | None:
        """The server's own `get_state()`, when it has one."""
        return self._get_state() if self._get_state else None

    def _options(self, sampling: Sampling) -> dict[str, Any]:
        options: dict[str, Any] = {"n": 1, "temperature": sampling.temperature}
        if self._tools:
            options["tools"] = self._tools
        for name in ("max_tokens", "top_p", "seed"):
            if (value := getattr(sampling, name)) is not None:
                options[name] = value
        if sampling.stop:
            options["stop"] = list(sampling.stop)
        if sampling.extra_body:
            options["extra_body"] = dict(sampling.extra_body)
        return options

    def _read(self, response: Any) -> ModelTurn:
        choices = get(response, "choices")
        if not choices and (error := get(response, "error")):
            raise failure_in(error)
        if not choices or get(choices[0], "message") is None:
            raise ModelRefused("the server answered without a choice")
        message = get(choices[0], "message")
        content = get(message, "content")
        content = sendable(content) if isinstance(content, str) else ""
        reasoning = extract_reasoning(message)
        usage = get(response, "usage")
        turn = ModelTurn(
            content=content,
            calls=tuple(_call(item) for item in get(message, "tool_calls") or ()),
            reasoning=sendable(reasoning) if reasoning else None,
            finish_reason=get(choices[0], "finish_reason") or "stop",
            raw_text=content,
            prompt_tokens=_count_of(usage, "prompt_tokens"),
            sampled_tokens=_count_of(usage, "completion_tokens"),
        )
        if turn.calls or self._parser is None or not self._tools:
            return turn
        return parsed_turn(turn, self._parser, self._tools)


def parsed_turn(turn: ModelTurn, parser: TextParser, tools: Sequence[ToolSchema]) -> ModelTurn:
    """The turn with calls and malformed markup read from its text; unchanged when there is no markup in it."""
    parsed = parser.parse(turn.content, tools)
    if not parsed.calls and not parsed.errors:
        return turn
    return replace(
        turn,
        content="\n".join(part for part in (parsed.content, parsed.trailing) if part) if parsed.calls else turn.content,
        calls=parsed_calls(parsed),
        reasoning=turn.reasoning or parsed.reasoning or None,
    )


def get(thing: Any, name: str) -> Any:
    """A field of an object or of a dict; None when it is missing."""
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _completion_of(server: Any, model: str | None) -> Completion:
    if callable(duck := getattr(server, "chat_completion", None)):
        completion: Completion = duck
        return completion
    if callable(getattr(getattr(getattr(server, "chat", None), "completions", None), "create", None)):
        if not model:
            raise ValueError("an OpenAI client needs `model=`: the name the server knows the model by")
        # The loop retries by its own rules; the client's retries on top would multiply them.
        client = server.with_options(max_retries=0) if hasattr(server, "with_options") else server

        async def create(**options: Any) -> Any:
            return await client.chat.completions.create(model=model, **options)

        return create
    kind = type(server).__name__
    raise TypeError(
        f"{kind} is not a model server: expected a ModelServer, an AsyncOpenAI or an object with chat_completion"
    )


def _with_ids(turn: ModelTurn, answers: Sequence[Message]) -> ModelTurn:
    """The turn with the ids by which its calls were answered, in order: the loop replaces missing and repeated ones."""
    ids = [str(message.get("tool_call_id")) for message in answers if message.get("role") == "tool"]
    answered = [replace(call, call_id=call_id) for call, call_id in zip(turn.calls, ids, strict=False)]
    return replace(turn, calls=(*answered, *turn.calls[len(answered) :]))


def _call(item: Any) -> ToolCallRecord:
    function = get(item, "function")
    name = get(function, "name")
    return ToolCallRecord(
        name=name if isinstance(name, str) else "",
        raw_arguments=get(function, "arguments"),
        call_id=get(item, "id") or "",
        error=None if isinstance(name, str) and name else "The call has no function name.",
    )


def _count_of(usage: Any, name: str) -> int | None:
    value = get(usage, name) if usage is not None else None
    return value if isinstance(value, int) else None
