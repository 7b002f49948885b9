"""Finds out by rendering probes how a chat template behaves, and refuses what cannot be continued exactly.

Nothing here knows a template by name. Probes are small conversations whose contents are unique words, so that what the
template wrote around them can be read off its output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

from agent_loop.model.contract import Message, ToolSchema
from agent_loop.model.tokens.message_shape import MessageShape
from agent_loop.model.tokens.template import (
    LOCAL_HISTORY,
    MARKER,
    ChatTemplate,
    Renderer,
    TemplateRefused,
    Tokenizer,
    Traits,
    added_texts,
    guard_for,
    marker_turn,
    opens_thinking,
    render_after_marker,
    special_texts,
    split_after_marker,
)

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


def probe_template(
    tokenizer: Tokenizer,
    template: str | None = None,
    *,
    stop_ids: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
) -> ChatTemplate:
    """Bind a template to a tokenizer; raises TemplateRefused when not even a plain conversation is exact.

    `stop_ids` are the model's own stop tokens when they are more than the tokenizer's EOS.
    """
    renderer = Renderer(tokenizer, template, options or {})
    known = [*stop_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])]
    prober = _Prober(renderer, [_text(tokenizer, i) for i in known])
    traits = prober.traits()
    ends = [tokenizer.encode(e, add_special_tokens=False) for e in (traits.call_end, traits.answer_end) if e]
    if any(len(end) != 1 for end in ends):
        raise TemplateRefused("the chat template ends assistant turns with something other than a single token")
    renderer.guard = guard_for(tokenizer, prober.written(traits))
    return ChatTemplate(renderer, traits, frozenset(known) | {e[0] for e in ends}, frozenset(stop_ids))


def _text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.decode([token_id], skip_special_tokens=False)


class _Prober:
    """The questions, in the order in which each builds on the answers before."""

    def __init__(self, renderer: Renderer, stops: Sequence[str]) -> None:
        self.render = renderer
        self.stops = list(stops)
        self.special = special_texts(renderer.tokenizer)
        self.added = added_texts(renderer.tokenizer)

    def traits(self) -> Traits:
        """Everything about the template."""
        tools = [TOOL]
        shape, refusal = self._find_shape(tools)
        if refusal is not None:
            return self._without_tools(refusal)
        traits = Traits(shape=shape)
        traits = replace(traits, call_end=self._end(PENDING["one result"], tools, shape))
        traits = replace(traits, answer_end=self._end(PENDING["a user message"], tools, shape))
        traits = replace(traits, role_marker_ends=self._role_markers(traits, tools))
        traits = replace(traits, glue=self._glue_kind(traits, tools))
        traits = replace(traits, schemas_in_glue=self._schemas_in_glue(traits, tools))
        return self._details(traits, tools)

    def written(self, traits: Traits) -> str:
        """All that the template writes around the probes' words, for a guard to find its markers in."""
        tools = [TOOL] if traits.tools else []
        texts = []
        for history in HISTORIES:
            with suppress(TemplateRefused):
                texts.append(self.render([*history], tools, generate=True, shape=traits.shape))
        return "\n".join(texts)

    def _without_tools(self, refusal: str) -> Traits:
        shape = MessageShape()
        end = self._end(PENDING["a user message"], [], shape)
        traits = Traits(shape=shape, tools=False, answer_end=end, no_tools_because=refusal)
        traits = replace(traits, role_marker_ends=self._role_markers(traits, []))
        return replace(traits, glue=self._glue_kind(traits, []))

    # -- shape of messages -------------------------------------------------------------------------------------

    def _find_shape(self, tools: list[ToolSchema]) -> tuple[MessageShape, str | None]:
        """The first shape in which calls and results come out as they are, or why none does."""
        refusal = "writes no tools"
        for shape in _shapes():
            try:
                refusal_here = self._refusal_of(shape, tools)
            except TemplateRefused as error:
                refusal = str(error)
                continue
            if refusal_here is None:
                return self._finish_shape(shape, tools), None
            refusal = refusal_here
        return MessageShape(), refusal

    def _refusal_of(self, shape: MessageShape, tools: list[ToolSchema]) -> str | None:
        text = self.render([USER, call_turn(1), result(1)], tools, generate=True, shape=shape)
        if "Xa1probe" not in text:
            return "writes no tool calls"
        if "Xr1probe" not in text:
            return "writes no tool results"
        if text.index("Xa1probe") > text.rindex("Xr1probe"):
            return "writes results before the calls they answer"
        return "writes arguments as an escaped string" if '\\"a\\"' in text else None

    def _finish_shape(self, shape: MessageShape, tools: list[ToolSchema]) -> MessageShape:
        try:
            two = self.render([USER, call_turn(1, 2), result(1), result(2)], tools, generate=True, shape=shape)
            parallel = all(word in two for word in ("Xa1probe", "Xa2probe", "Xr1probe", "Xr2probe"))
        except TemplateRefused:
            parallel = False
        shape = replace(shape, parallel_calls=parallel)
        for key in ("reasoning_content", "thinking", "reasoning"):
            thinking = replace(shape, reasoning_key=key)
            try:
                text = self.render(
                    [USER, call_turn(1, reasoning=THOUGHT), result(1)], tools, generate=True, shape=thinking
                )
            except TemplateRefused:
                continue
            if THOUGHT in text:
                return thinking
        return replace(shape, reasoning_key="")

    # -- where turns end ---------------------------------------------------------------------------------------

    def _end(self, pending: Sequence[Message], tools: list[ToolSchema], shape: MessageShape) -> str:
        """The token that ends the turn before `pending`: a known stop token, or the one the template shows."""
        tail = render_after_marker(self.render, LOCAL_HISTORY, pending, tools, shape)
        between = tail[: tail.index(str(pending[0]["content"]))] if str(pending[0]["content"]) in tail else tail
        if known := _first_of(between, self.stops):
            return known
        own_tail = self._own_tail(pending, tools, shape)
        for candidates in (self.special, self.added):  # tokens that are not called special may close a call as well
            own = _in_order(own_tail, candidates)
            if own and own[-1] in between:
                return own[-1]
            if ends := _in_order(between, candidates):
                return ends[0]
        raise TemplateRefused(
            "the chat template ends assistant turns with no special token: where a turn ends is unclear"
        )

    def _own_tail(self, pending: Sequence[Message], tools: list[ToolSchema], shape: MessageShape) -> str:
        """What follows the marker when its turn is the last message."""
        turn = marker_turn(pending, shape)
        try:
            text = self.render([*LOCAL_HISTORY, turn], tools, generate=False, shape=shape)
        except TemplateRefused:
            return ""
        return text.rpartition(MARKER)[2]

    def _role_markers(self, traits: Traits, tools: list[ToolSchema]) -> tuple[str, ...]:
        """Endings that open what follows: generation opens with them too, or no other token opens it."""
        prompt = self._generation_prompt(tools, traits.shape)
        ends = {"one result": traits.call_end, "a user message": traits.answer_end}
        markers = []
        for name, end in ends.items():
            if not end:
                continue
            _, glue = split_after_marker(self.render, LOCAL_HISTORY, PENDING[name], tools, traits)
            direct = not _in_order(glue.partition(str(PENDING[name][0]["content"]))[0], self.added)
            own = self._own_tail(PENDING[name], tools, traits.shape)
            if end in prompt or (direct and (end not in own or traits.call_end != traits.answer_end)):
                markers.append(end)
        return tuple(dict.fromkeys(markers))

    def _generation_prompt(self, tools: list[ToolSchema], shape: MessageShape) -> str:
        """What is written after a user message only when the model is to speak."""
        with_prompt, without = (self.render([USER], tools, generate=g, shape=shape) for g in (True, False))
        return with_prompt.removeprefix(without) if with_prompt.startswith(without) else ""

    # -- glue --------------------------------------------------------------------------------------------------

    def _glue_kind(self, traits: Traits, tools: list[ToolSchema]) -> str:
        for name, pending in PENDING.items():
            if pending[0]["role"] == "tool" and not traits.tools:
                continue
            glues = set(self._glues(traits, tools, pending))
            if not glues:
                raise TemplateRefused(f"the chat template cannot continue a conversation with {name}")
            missing = [m["content"] for m in pending for glue in glues if m["content"] not in glue]
            if missing:
                raise TemplateRefused(f"the chat template loses content when {name} follows an assistant turn")
            if len(glues) > 1:
                return "whole"
        return "local"

    def _glues(self, traits: Traits, tools: list[ToolSchema], pending: Sequence[Message]) -> Iterator[str]:
        """Glue for the same messages after each history that the template accepts."""
        for history in HISTORIES:
            if any(m["role"] == "tool" for m in history) and not traits.tools:
                continue
            try:
                tail_history = history if history[-1]["role"] != "assistant" else history[:-1]
                yield "\x00".join(split_after_marker(self.render, tail_history, pending, tools, traits))
            except TemplateRefused:
                continue

    def _schemas_in_glue(self, traits: Traits, tools: list[ToolSchema]) -> bool:
        """Whether any glue changes when the schemas are left out."""
        if traits.glue == "whole":
            return True
        for pending in PENDING.values():
            given = split_after_marker(self.render, LOCAL_HISTORY, pending, tools, traits)
            try:
                if split_after_marker(self.render, LOCAL_HISTORY, pending, [], traits) != given:
                    return True
            except TemplateRefused:
                return True
        return False

    # -- what is only told -------------------------------------------------------------------------------------

    def _details(self, traits: Traits, tools: list[ToolSchema]) -> Traits:
        _, one = split_after_marker(self.render, LOCAL_HISTORY, PENDING["one result"], tools, traits)
        _, two = split_after_marker(self.render, LOCAL_HISTORY, PENDING["two results"], tools, traits)
        closing = one[one.rindex("Xr7probe") + len("Xr7probe") :]
        without = self.render(
            [*LOCAL_HISTORY, marker_turn(PENDING["one result"], traits.shape), *PENDING["one result"]],
            tools,
            generate=False,
            shape=traits.shape,
        )
        between = two[two.index("Xr7probe") + 8 : two.index("Xr8probe")] if "Xr8probe" in two else ""
        before = (traits.call_end if traits.role_marker_ends else "") + one[: one.index("Xr7probe")]
        header = _in_order(before, self.special) or _in_order(before, self.added)
        first = self.render([USER], tools, generate=True, shape=traits.shape)
        return replace(
            traits,
            merged_results=bool(header) and not any(token in between for token in header),
            prompt_after_results=not without.endswith(closing),
            starts_in_thinking=opens_thinking(first),
            schemas="Xd1probe" in first,
            thinking=self._thinking(traits, tools),
            prefix_stable=self._prefix_stable(traits, tools),
        )

    def _thinking(self, traits: Traits, tools: list[ToolSchema]) -> str:
        if not traits.shape.reasoning_key:
            return "none"
        turns = [USER, call_turn(1, reasoning=THOUGHT), result(1), call_turn(2), result(2)]
        return "kept" if THOUGHT in self.render(turns, tools, generate=True, shape=traits.shape) else "stripped"

    def _prefix_stable(self, traits: Traits, tools: list[ToolSchema]) -> bool:
        turns = [USER, call_turn(1, reasoning=THOUGHT), result(1), call_turn(2), result(2), call_turn(3), result(3)]
        views = [self.render(turns[:n], tools, generate=True, shape=traits.shape) for n in (1, 3, 5, 7)]
        return all(later.startswith(earlier) for earlier, later in pairwise(views))


def _shapes() -> Iterator[MessageShape]:
    for short_ids in (False, True):
        for arguments in ("dict", "string"):
            yield MessageShape(arguments=arguments, short_call_ids=short_ids)


def _in_order(text: str, candidates: Sequence[str]) -> list[str]:
    """The candidates that stand in a text, in its order."""
    found: list[str] = []
    while token := _first_of(text, candidates):
        found.append(token)
        text = text[text.index(token) + len(token) :]
    return found


def _first_of(text: str, candidates: Sequence[str]) -> str | None:
    """The candidate that occurs first in the text; of two that start together the longer one."""
    found = [(text.find(c), -len(c), c) for c in candidates if c and c in text]
    return min(found)[2] if found else None
