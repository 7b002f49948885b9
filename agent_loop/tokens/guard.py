"""Keeps text that looks like a special token text: nothing a command prints can end a turn or open a role.

Before rendering, a special token's spelling inside a tool result or a user message is broken by a noncharacter; when
the rendered text is tokenized, it is cut there, so its pieces are plain text again. Text without such spellings, which
is nearly all text, is tokenized as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agent_loop.model import Message

BREAK = "\ufdd0"
"""A code point that Unicode keeps out of texts for ever; one that is in a text all the same is dropped."""
GUARDED_ROLES = frozenset({"tool", "user"})


class Guard:
    """Knows the spellings of one tokenizer's special tokens."""

    def __init__(self, special: Sequence[str]) -> None:
        spellings = sorted({s for s in special if len(s) > 1}, key=len, reverse=True)
        self._openings = tuple({s[:2] for s in spellings})
        self._spelling = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    def protect(self, messages: Sequence[Message]) -> list[Message]:
        """The same messages, with spellings broken where they are only text."""
        return [self._protected(m) if m.get("role") in GUARDED_ROLES else m for m in messages]

    def _protected(self, message: Message) -> Message:
        content = message.get("content")
        if self._spelling is None or not isinstance(content, str) or not any(o in content for o in self._openings):
            return message
        broken = self._spelling.sub(lambda found: found[0][0] + BREAK + found[0][1:], content)
        return message | {"content": broken} if broken != content else message


def pieces(text: str) -> list[str]:
    """Rendered text, cut where a spelling was broken."""
    return text.split(BREAK) if BREAK in text else [text]
