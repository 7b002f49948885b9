"""The error of every bad setting."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """Bad input: the message names what is wrong, where, and what would be right."""


class ConfigError(UsageError):
    """A setting is wrong: the message says where it stands, what is wrong and what would be right."""


def did_you_mean(word: str, valid: Iterable[str]) -> str:
    """The nearest valid name as a hint, or all names when none is near."""
    names = sorted(valid)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    if near:
        return f"did you mean {near[0]!r}?"
    if not names:
        return "nothing can be set here"
    return f"valid: {', '.join(names)}"
