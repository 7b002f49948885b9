"""Text of agents and tasks for a terminal: what would steer it, or turn a line around, is shown and not obeyed."""

from __future__ import annotations

KEPT = "\n\t"
_SEEN = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in KEPT} | {0x7F: "\u2421"}
_SEEN |= {code: f"‹U+{code:04X}›" for code in (*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def printable(text: str) -> str:
    """The text with ␛ for an escape, and so on."""
    return text.translate(_SEEN)
