"""Plays random conversations through the recorder on one template and compares what was sent with two oracles.

`glue`: the template renders the whole real conversation; what it writes after the last assistant turn must be what the
recorder appended (which it worked out without that conversation). `render`: where re-rendering the conversation begins
with what was sent before, the whole prompt must equal the re-render. And the log of what the server got and gave must
be the segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace

from agent_loop.model.backends.backend import Generation
from agent_loop.model.contract import Message, Sampling
from agent_loop.model.recorder import RecordedConversation, Recorder
from agent_loop.model.tokens.template import ChatTemplate, TemplateRefused

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} does things",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "what"},
                    "n": {"type": "integer", "description": "how many"},
                },
                "required": ["text"],
            },
        },
    }
    for name in ("terminal", "search")
]


@dataclass
class Turn:
    """One assistant turn that the scripted model will sample."""

    message: Message
    last_word: str
    """A word that occurs once in the conversation: the last thing the model writes before markup and end."""


class ScriptedModel:
    """A backend that samples what it is told, and a parser that reads it back without knowing the format."""

    def __init__(self) -> None:
        self.next_ids: list[int] = []
        self.next_turn = Turn({}, "")
        self.log: list[tuple[list[int], list[int], list[float]]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, *, stop_ids=()) -> Generation:
        logprobs = [-(len(prompt_ids) + k) / 7919 for k in range(len(self.next_ids))]
        self.log.append((list(prompt_ids), list(self.next_ids), logprobs))
        return Generation(list(self.next_ids), logprobs, "stop")

    async def close(self) -> None:
        pass

    def parse(self, text: str, tools=None, start: str = "content") -> SimpleNamespace:
        message = self.next_turn.message
        calls = [
            SimpleNamespace(
                name=c["function"]["name"], arguments=c["function"]["arguments"], raw="", error=None, repaired=()
            )
            for c in message.get("tool_calls", [])
        ]
        reasoning = message.get("reasoning_content", "")
        return SimpleNamespace(content=message["content"], trailing="", reasoning=reasoning, calls=calls, errors=())


@dataclass
class Played:
    """What was seen over some conversations."""

    turns: int = 0
    rerendered: int = 0
    same_ids: int = 0
    restarts: int = 0
    cut_short: int = 0
    differences: list[str] = field(default_factory=list)


@dataclass
class Play:
    """One template's conversations."""

    template: ChatTemplate
    rng: Random
    tools: list[dict] = field(default_factory=lambda: TOOLS)
    seen: Played = field(default_factory=Played)
    words: int = 0

    def __post_init__(self) -> None:
        self.model = ScriptedModel()
        if not self.template.traits.schemas:
            self.tools = []
        self.recorder = Recorder(self.model, self.template, self.model)

    async def conversation(self, turns: int) -> None:
        """One random conversation of up to so many turns."""
        self.model.log = []
        messages = [{"role": "user", "content": self.word()}]
        if self.rng.random() < 0.5:
            messages = [{"role": "system", "content": self.word()}, *messages]
        conversation = self.recorder.open(messages, self.tools)
        expected: str | None = ""
        for _ in range(turns):
            turn = self.turn()
            follow = self.follow_up(turn)
            ended = self.rng.random() > 0.1
            expected = self.check_rendered(messages, expected, conversation)
            text = await self.sample(conversation, messages, turn, follow, ended=ended)
            expected = None if expected is None or not ended else expected + text
            if not self.append(conversation, messages, turn, follow, ended=ended):
                break
            messages = [*messages, turn.message, *follow]
            if self.rng.random() < 0.15:
                messages = self.shortened(messages)
                conversation.restart(messages)
                self.seen.restarts += 1
                expected = ""
        self.check_log(conversation)

    def word(self) -> str:
        """A word that nothing else contains; sometimes with odd neighbours."""
        self.words += 1
        return self.rng.choice(("", "été ", "x = {'a': 1}; ", "two\nlines ", "日本 ")) + f"W{self.words:05d}w"

    def turn(self) -> Turn:
        """A random assistant turn: calls or an answer, with or without thinking."""
        message: Message = {"role": "assistant", "content": ""}
        if self.template.traits.shape.reasoning_key and self.rng.random() < 0.5:
            message["reasoning_content"] = self.word()
        if self.rng.random() < 0.25:
            message["content"] = last = self.word()
            return Turn(message, last)
        most = 3 if self.template.traits.shape.parallel_calls else 1
        calls = []
        for _ in range(self.rng.randint(1, most)):
            last = f"plain W{self.words:05d}a"
            self.words += 1
            function = {"name": self.rng.choice(("terminal", "search")), "arguments": {"n": 3, "text": last}}
            calls.append({"id": f"c{self.words:08d}"[:9], "type": "function", "function": function})
        message["tool_calls"] = calls
        return Turn(message, last)

    def follow_up(self, turn: Turn) -> list[Message]:
        """Results for every call, or a user message."""
        calls = turn.message.get("tool_calls", [])
        results = [
            {"role": "tool", "tool_call_id": c["id"], "name": c["function"]["name"], "content": self.word()}
            for c in calls
        ]
        if results and self.rng.random() > 0.1:
            return results
        return [*results, {"role": "user", "content": self.word()}]

    def render(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        """The template's own rendering."""
        return self.template.renderer(messages, self.tools, generate=generate, shape=self.template.traits.shape)

    async def sample(
        self,
        conversation: RecordedConversation,
        messages: list[Message],
        turn: Turn,
        follow: list[Message],
        *,
        ended: bool,
    ) -> str:
        """Let the model sample the turn as the template would write it; returns its text."""
        body, end = self.written(messages, turn, follow)
        text = body + end if ended else body
        self.model.next_ids = self.template.encode(text)
        self.model.next_turn = turn
        await conversation.sample(Sampling())
        self.seen.turns += 1
        self.seen.cut_short += not ended
        return text

    def written(self, messages: list[Message], turn: Turn, follow: list[Message]) -> tuple[str, str]:
        """The turn's text and its ending token, read off the template where it can be."""
        traits = self.template.traits
        end = traits.call_end if turn.message.get("tool_calls") else traits.answer_end
        before = self.render(messages)
        try:
            full = self.render([*messages, turn.message, *follow])
        except TemplateRefused:
            return f"whatever it says {turn.last_word}", end
        stop = full.find(end, full.rindex(turn.last_word))
        if full.startswith(before) and stop > 0:
            return full[len(before) : stop], end
        return f"whatever it says {turn.last_word}", end

    def append(
        self,
        conversation: RecordedConversation,
        messages: list[Message],
        turn: Turn,
        follow: list[Message],
        *,
        ended: bool,
    ) -> bool:
        """Append what follows and compare the glue with the whole conversation's; False when neither can do it."""
        sent = len(self.model.log[-1][0]) + len(self.model.log[-1][1])
        end = self.template.traits.call_end if turn.message.get("tool_calls") else self.template.traits.answer_end
        try:
            full = self.render([*messages, turn.message, *follow])
        except TemplateRefused:
            full = None
        try:
            conversation.append(follow)
            appended = conversation.prompt_tokens() - sent
        except TemplateRefused as refused:
            if full is not None:
                self.seen.differences.append(f"refused what the template renders: {refused}")
            return False
        if full is None:
            self.seen.differences.append("continued what the template cannot render")
            return False
        tail = full[full.rindex(turn.last_word) + len(turn.last_word) :]
        glue = self.template.encode(tail[tail.index(end) :])
        wanted = glue[1:] if ended else glue
        if conversation._glue_ids() != wanted or appended != len(wanted):
            self.seen.differences.append(f"glue: wanted {wanted[:20]}, appended {conversation._glue_ids()[:20]}")
        return True

    def check_rendered(
        self, messages: list[Message], expected: str | None, conversation: RecordedConversation
    ) -> str | None:
        """Where the re-render extends what was sent, the prompt must be the re-render; returns what is sent now."""
        full = self.render(messages)
        if expected is None or not full.startswith(expected):
            return None
        sent = conversation._ledger.tokens + conversation._glue_ids()
        self.seen.rerendered += 1
        if self.template.decode(sent) != full:
            self.seen.differences.append(f"the prompt does not read as the re-render of {len(messages)} messages")
        whole = self.template.encode(full)
        before = conversation._ledger.tokens
        if whole[: len(before)] == before:  # else the tokenizer itself joins what was sampled apart
            self.seen.same_ids += 1
            if whole != sent:
                self.seen.differences.append(f"the prompt is not the re-render of {len(messages)} messages")
        return full

    def shortened(self, messages: list[Message]) -> list[Message]:
        """A truncated view: the head and the last assistant turn with what follows it."""
        last = max(k for k, m in enumerate(messages) if m["role"] == "assistant")
        head = messages[: 2 if messages[0]["role"] == "system" else 1]
        return [*head, *messages[last:]]

    def check_log(self, conversation: RecordedConversation) -> None:
        """The stored calls are the model's own log, and the segments hold each sampled token once."""
        calls = [(c.prompt_ids, c.sampled_ids, c.logprobs) for c in conversation.sampled_calls()]
        if calls != self.model.log:
            self.seen.differences.append("the stored calls are not what the server saw")
        trained = [t for s in conversation.segments() for t in s.masks if t != -100]
        if trained != [t for _, ids, _ in self.model.log for t in ids]:
            self.seen.differences.append("the trained tokens are not the sampled ones")
