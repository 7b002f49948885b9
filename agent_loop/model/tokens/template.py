"""One chat template on one tokenizer: the first prompt of a segment, and the glue that follows a sampled turn.

Glue is everything the template writes between the end of an assistant turn and the next generation: the rest of the
turn's ending, tool results or user messages, role markers, the generation prompt. It is found by rendering a stand-in
turn that carries a marker, so the sampled turn itself is never rendered and its ids are never touched. The marker's
turn ends where the first stop token after it stands: that is where a model stops sampling.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, cast

import orjson

from agent_loop.model.contract import Message, ModelRefused, ToolSchema
from agent_loop.model.tokens.message_shape import MessageShape, shape_messages

BREAK = "\ufdd0"
"""A code point that Unicode keeps out of texts for ever; one that is in a text all the same is dropped."""
GUARDED_ROLES = frozenset({"tool", "user", "system", "developer"})
GUARDED_FIELDS = ("content", "name")


class Guard:
    """Breaks what would be read as markup in messages that the model did not write.

    `added` are the tokens that a tokenizer finds in any text, whatever their flags say: DeepSeek does not call its role
    markers special. `markers` are those that a template writes as plain text, each with the places where it is cut so
    that its ids become others.
    """

    def __init__(
        self,
        added: Iterable[str],
        markers: Mapping[str, Sequence[int]] | None = None,
        normalize: Callable[[str], str] | None = None,
    ) -> None:
        """`normalize` is given where a tokenizer looks for its added tokens in normalized text."""
        added = {text for text in added if len(text) > 1}
        self._added = _first_letters(added)
        self._markers = dict(markers or {})
        self._marker = re.compile("|".join(map(re.escape, self._markers))) if self._markers else None
        self._openings = tuple({text[:2] for text in (*added, *self._markers)})
        self._normalize = normalize
        self._normalized = _first_letters({normalize(text) for text in added}) if normalize else None

    def protect(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages, with spellings broken where they are only text."""
        return [self._protected(m) if m.get("role") in GUARDED_ROLES else m for m in messages]

    def _protected(self, message: Message) -> Message:
        broken = {key: self._broken(message[key]) for key in GUARDED_FIELDS if key in message}
        return message | broken if any(broken[key] is not message[key] for key in broken) else message

    def _broken(self, value: Any) -> Any:
        """The texts of a value, however deep: content may be a list of parts."""
        if isinstance(value, str):
            return self._broken_text(value)
        if isinstance(value, list):
            return [self._broken(item) for item in value]
        if isinstance(value, dict):
            return {key: self._broken(item) for key, item in value.items()}
        return value

    def _broken_text(self, text: str) -> str:
        if any(opening in text for opening in self._openings):
            if self._marker is not None:
                text = self._marker.sub(lambda found: BREAK.join(_parts(found[0], self._markers[found[0]])), text)
            if self._added is not None:
                text = self._added.sub(lambda found: found[0] + BREAK, text)
        if self._normalized is not None and self._normalize is not None:
            parts = text.split(BREAK)
            if any(self._normalized.search(self._normalize(part)) for part in parts):
                return BREAK.join(letter for part in parts for letter in part)
        return text


def _first_letters(spellings: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the first letter of each spelling, of those that overlap too; None without spellings."""
    tails: dict[str, set[str]] = {}
    for text in spellings:
        if len(text) > 1:
            tails.setdefault(text[0], set()).add(text[1:])
    return re.compile("|".join(f"{re.escape(c)}(?={_any_of(rest)})" for c, rest in tails.items())) if tails else None


def _any_of(texts: set[str]) -> str:
    """A pattern for the beginning of any of these texts that tries each letter once, however many texts there are."""
    if "" in texts:
        return ""
    tails: dict[str, set[str]] = {}
    for text in texts:
        tails.setdefault(text[0], set()).add(text[1:])
    return "(?:" + "|".join(re.escape(c) + _any_of(rest) for c, rest in sorted(tails.items())) + ")"


def _parts(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise((0, *cuts, len(text)))]


def pieces(text: str) -> list[str]:
    """Rendered text, cut where a spelling was broken."""
    return text.split(BREAK) if BREAK in text else [text]


PROMPT_END_TOKENS = 16
"""Tokens at a prompt's end that are read to see whether it opens a thinking block."""
REMEMBERED_TEXTS, LONGEST_REMEMBERED = 4096, 4096
"""Texts whose ids are remembered, and how many characters one may have: 16 MB of text at most."""
REMEMBERED_PROMPTS = 16
"""The first prompts of the groups that run side by side, and of a truncation the view that was just counted."""
MARKER_LIKE = re.compile(r"<[^\s<>=]{1,60}[>=]|<[^\s<>=]{2,60}(?= \w+=)|\[/?[A-Z_]{3,40}\]")
"""What a template writes as markup: `<tag>`, `<|role|>`, `<function=`, `<invoke name=`, `[INST]`."""
MARKER = "Zq7kVx9w"
"""Stands in the stand-in turn: letters and digits, so that no template escapes or trims it."""


class TemplateRefused(ModelRefused):
    """This template cannot be continued exactly; the message names the trait."""


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    eos_token_id: int | None
    all_special_ids: list[int]
    added_tokens_decoder: Mapping[int, Any]

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        """Render a chat template."""

    def encode(self, text: str, **options: Any) -> list[int]:
        """Text to ids."""

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """Ids to text."""


_THINKING_OPENED = re.compile(r"(<[a-z_]*:?think(ing)?(:[a-z]+)?>|\[THINK\]|<\|START_THINKING\|>)\s*\Z")


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt ends with an opened thinking block, so that what is sampled begins inside it."""
    return _THINKING_OPENED.search(prompt) is not None


def special_texts(tokenizer: Tokenizer) -> list[str]:
    """The spellings of the tokens that a tokenizer calls special, longest first."""
    added = tokenizer.added_tokens_decoder
    return _texts(tokenizer, {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)})


def added_texts(tokenizer: Tokenizer) -> list[str]:
    """The spellings of all tokens that a tokenizer finds in any text, longest first."""
    return _texts(tokenizer, {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})


def _texts(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    return sorted({tokenizer.decode([i], skip_special_tokens=False) for i in ids} - {""}, key=len, reverse=True)


def guard_for(tokenizer: Tokenizer, written: str = "") -> Guard:
    """A guard for a tokenizer and for the markers in a text that a template wrote."""
    added = {*added_texts(tokenizer), *(str(token) for token in tokenizer.added_tokens_decoder.values())}
    markers = {text: _cuts(tokenizer, text) for text in set(MARKER_LIKE.findall(written)) - added}
    normalizer = getattr(_fast(tokenizer), "normalizer", None)
    normalized = any(getattr(token, "normalized", False) for token in tokenizer.added_tokens_decoder.values())
    return Guard(added, markers, normalizer.normalize_str if normalizer is not None and normalized else None)


def _cuts(tokenizer: Tokenizer, marker: str) -> Sequence[int]:
    """Where to cut a marker so that its parts have other ids than the whole: in one place, or else everywhere."""
    whole = tokenizer.encode(marker, add_special_tokens=False)
    for place in range(1, len(marker)):
        parts = (tokenizer.encode(part, add_special_tokens=False) for part in (marker[:place], marker[place:]))
        if [token for ids in parts for token in ids] != whole:
            return (place,)
    return range(1, len(marker))


@dataclass(frozen=True)
class Traits:
    """How a template behaves; found by `probe.probe_template`."""

    shape: MessageShape = field(default_factory=MessageShape)
    tools: bool = True
    """Whether tool calls and results are written at all."""
    schemas: bool = True
    """Whether the schemas of tools are written; if not, they belong into the system prompt."""
    no_tools_because: str = ""
    """What is missing when they are not."""
    glue: str = "local"
    """`local`: the glue is the same whatever came before; `whole`: it depends on it, so all messages are rendered."""
    schemas_in_glue: bool = True
    """Whether local glue depends on the tools' schemas; where it does not, they are not rendered with every turn."""
    call_end: str = ""
    """The token that ends an assistant turn with calls when results follow."""
    answer_end: str = ""
    """The token that ends an assistant turn without calls when a user message follows."""
    role_marker_ends: tuple[str, ...] = ()
    """Those of them that open the next message (GLM): sampled or not, they are written once."""
    merged_results: bool = False
    """Neighbouring tool results share one block."""
    prompt_after_results: bool = True
    """Whether a generation prompt follows tool results (not in DeepSeek V3.1 and Mistral)."""
    starts_in_thinking: bool = False
    """The generation prompt opens the thinking block, so sampled text begins inside it."""
    thinking: str = "none"
    """What re-rendering does with earlier thinking: kept, stripped, or none when the template writes none."""
    prefix_stable: bool = True
    """Whether rendering the longer conversation again would start with the shorter one."""


@dataclass
class Renderer:
    """Renders messages to text with one template; knows nothing of turns."""

    tokenizer: Tokenizer
    template: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    guard: Guard = field(init=False)

    def __post_init__(self) -> None:
        self.guard = guard_for(self.tokenizer)

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, generate: bool, shape: MessageShape
    ) -> str:
        """The conversation as text; raises TemplateRefused with the template's own words when it raises."""
        try:
            text = self.tokenizer.apply_chat_template(
                self.guard.protect(shape_messages(messages, shape)),
                tools=list(tools) or None,
                chat_template=self.template,
                add_generation_prompt=generate,
                tokenize=False,
                **self.options,
            )
        except Exception as error:  # a template is a program of its own: whatever it raises means "cannot render this"
            raise TemplateRefused(f"the chat template cannot render these messages: {error}") from error
        return cast("str", text)


@dataclass
class ChatTemplate:
    """A probed template: prompts and glue as ids."""

    renderer: Renderer
    traits: Traits
    stop_ids: frozenset[int]
    """Tokens that end a sampled turn."""
    given_stop_ids: frozenset[int] = frozenset()
    """Those that the caller named: they are sent with every request, the others are the server's own."""
    _prompts: dict[bytes, list[int]] = field(default_factory=dict, init=False, repr=False)
    _encoded: dict[str, list[int]] = field(default_factory=dict, init=False, repr=False)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the template is bound to."""
        return self.renderer.tokenizer

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text; the template writes every special token itself.

        The rollouts of a group get many of the same results (`ls`, the same file, the same error), so short texts are
        remembered: finding ids is the largest part of a turn's work.
        """
        if len(text) > LONGEST_REMEMBERED:
            return self._encode(text)
        ids = self._encoded.pop(text, None)
        if ids is None:
            ids = self._encode(text)
            if len(self._encoded) >= REMEMBERED_TEXTS:
                del self._encoded[next(iter(self._encoded))]
        self._encoded[text] = ids  # at the end: what was used last goes last
        return list(ids)

    def _encode(self, text: str) -> list[int]:
        if (fast := _fast(self.tokenizer)) is not None:
            # Unlike `encode` it does not work out where in the text each token stands: a quarter of the time.
            parts = fast.encode_batch_fast(pieces(text), add_special_tokens=False)
            return parts[0].ids if len(parts) == 1 else [token for part in parts for token in part.ids]
        encode = self.tokenizer.encode
        return [token for piece in pieces(text) for token in encode(piece, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return decode_ids(self.tokenizer, ids)

    def ends_in_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether sampling after this prompt begins inside a thinking block; looks at its end only."""
        return opens_thinking(self.decode(prompt_ids[-PROMPT_END_TOKENS:]))

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> str:
        """The whole view as text, ready for sampling."""
        if tools and not self.traits.tools:
            raise TemplateRefused(f"the chat template {self.traits.no_tools_because}: it cannot be used with tools")
        if tools and not self.traits.schemas:
            raise TemplateRefused(
                "the chat template writes no tool schemas: put them into the system prompt, with write_tools=False"
            )
        return self.renderer(messages, tools, generate=True, shape=self.traits.shape)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """The whole view as ids, ready for sampling: the prompt of a new segment.

        The rollouts of a group begin alike, so the last few prompts are remembered.
        """
        try:
            key = orjson.dumps((list(messages), list(tools)))
        except orjson.JSONEncodeError:
            return self.encode(self.prompt_text(messages, tools))
        if key not in self._prompts:
            self._prompts[key] = self.encode(self.prompt_text(messages, tools))
            if len(self._prompts) > REMEMBERED_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
        return list(self._prompts[key])

    def glue_ids(
        self, history: Sequence[Message], pending: Sequence[Message], tools: Sequence[ToolSchema], last_id: int | None
    ) -> list[int]:
        """Ids to append after a turn whose last sampled token is `last_id`, so that `pending` can be answered.

        `history` is everything before that turn; only templates with whole glue look at it.
        """
        end, glue = self.glue_text(history, pending, tools)
        ids = self.encode(end + glue)
        end_id = ids[0]
        if last_id == end_id:
            return ids[1:]
        if last_id in self.stop_ids and end not in self.traits.role_marker_ends:
            return ids[1:]  # another stop token (gpt-oss: return for end) took the place of the template's own
        return ids

    def glue_text(
        self, history: Sequence[Message], pending: Sequence[Message], tools: Sequence[ToolSchema]
    ) -> tuple[str, str]:
        """The turn's ending token as the template writes it, and all that follows it."""
        if self.traits.glue == "local":
            history, tools = LOCAL_HISTORY, tools if self.traits.schemas_in_glue else ()
        return split_after_marker(self.renderer, history, pending, tools, self.traits)


def _fast(tokenizer: Tokenizer) -> Any:
    """The tokenizers library's own object, where there is one: the same ids and text at two thirds of the time."""
    return getattr(tokenizer, "backend_tokenizer", None)


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of ids, character for character: special tokens stay, nothing is tidied up."""
    if (fast := _fast(tokenizer)) is not None:
        return cast("str", fast.decode(ids, skip_special_tokens=False))
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


LOCAL_HISTORY: tuple[Message, ...] = ({"role": "user", "content": "?"},)


def marker_turn(pending: Sequence[Message], shape: MessageShape) -> Message:
    """An assistant turn that carries the marker and fits the messages that answer it."""
    results = []
    for message in pending:
        if message.get("role") != "tool":
            break
        results.append(message)
    if not results:
        return {"role": "assistant", "content": MARKER}
    calls = [
        {
            "id": str(result.get("tool_call_id") or f"call_{index}"),
            "type": "function",
            "function": {"name": str(result.get("name") or "tool"), "arguments": {"a": MARKER}},
        }
        for index, result in enumerate(results)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls if shape.parallel_calls else calls[-1:]}


def render_after_marker(
    renderer: Renderer,
    history: Sequence[Message],
    pending: Sequence[Message],
    tools: Sequence[ToolSchema],
    shape: MessageShape,
) -> str:
    """What the template writes after the marker when `pending` follows the marker's turn."""
    turn = marker_turn(pending, shape)
    text = renderer([*history, turn, *pending], tools, generate=True, shape=shape)
    _, found, tail = text.rpartition(MARKER)
    if not found:
        raise TemplateRefused("the chat template does not write what assistant turns say")
    return tail


def split_after_marker(
    renderer: Renderer,
    history: Sequence[Message],
    pending: Sequence[Message],
    tools: Sequence[ToolSchema],
    traits: Traits,
) -> tuple[str, str]:
    """The turn's ending token and the glue after it."""
    tail = render_after_marker(renderer, history, pending, tools, traits.shape)
    end = traits.call_end if pending[0].get("role") == "tool" else traits.answer_end
    _, found, glue = tail.partition(end)
    if not end or not found:
        raise TemplateRefused("the chat template ends this assistant turn with no token of its own")
    return end, glue
