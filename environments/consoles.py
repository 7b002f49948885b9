"""Where verbs print tables and lines for people."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 160
"""Columns where there is no terminal: no line of a table is broken."""


def new_console(
    *, stderr: bool = False, pipe_width: int | None = None, emoji: bool = True, markup: bool = True
) -> Console:
    """A console that takes no bright colours for what looks like a number or a name: a light terminal swallows them."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else pipe_width
    return Console(stderr=stderr, width=width, emoji=emoji, markup=markup, highlight=False)
