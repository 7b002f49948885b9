"""Finds the model's reasoning in an answer: structured fields first, think blocks in the content last.

The text is only read, never removed: templates that need the thinking of earlier turns get it back as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BLOCKS = (("<think>", "</think>"), ("<thinking>", "</thinking>"), ("[THINK]", "[/THINK]"))


def extract_reasoning(message: Any) -> str | None:
    """Reasoning of an answer (object or dict): reasoning_content, reasoning, reasoning_details, think blocks."""
    for name in ("reasoning_content", "reasoning"):
        text = _get(message, name)
        if isinstance(text, str) and text:
            return text
    details = _get(message, "reasoning_details")
    for detail in details if isinstance(details, (list, tuple)) else ():
        text = _get(detail, "text")
        if isinstance(text, str) and text:
            return text
    content = _get(message, "content")
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


def _get(thing: Any, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
