"""What a client sees of a command's output: decoded, capped to head and tail by characters, with exact counts."""

from __future__ import annotations

from typing import Any

from .channel import Message


def shown(head: bytes, tail: bytes, truncated: bool, chars: int, max_chars: int, log: str) -> tuple[str, int]:
    """The text to show (40 % head, 60 % tail) and how many characters it leaves out."""
    text = head.decode("utf-8", "replace")
    if not truncated:
        return text, 0
    head_chars = max_chars * 2 // 5
    tail_chars = max_chars - head_chars
    omitted = chars - max_chars
    ending = tail.decode("utf-8", "replace")
    note = f"\n... [{omitted} of {chars} characters omitted; all of it is in {log}] ...\n"
    return text[:head_chars] + note + (ending[-tail_chars:] if tail_chars else ""), omitted


def split_exit(message: Message, max_chars: int, log: str) -> tuple[dict[str, Any], str, str, bytes]:
    """Truncation facts, stdout, stderr and the saved state out of a keeper's exit message."""
    position = 0
    texts = []
    facts: dict[str, Any] = {}
    for name, path in (("out", log), ("err", f"{log}.stderr")):
        head_size, tail_size = message.number(f"{name}_head"), message.number(f"{name}_tail", -1)
        chars = message.number(f"{name}_chars")
        head = message.raw[position : position + head_size]
        position += head_size
        tail = message.raw[position : position + max(tail_size, 0)]
        position += max(tail_size, 0)
        text, omitted = shown(head, tail, tail_size >= 0, chars, max_chars, path)
        texts.append(text)
        if tail_size >= 0:
            facts[name] = {"total": chars, "omitted": omitted, "log": path}
    return facts, texts[0], texts[1], message.raw[position:]
