"""Streamed text, whole calls at a time, on the same engine.

`feed` gives each call once no later text can change it; `finish` gives the whole turn, equal to `parse` of the whole
text however it was split. Calls that needed repair or guessing wait for `finish`. Work stays within a fixed multiple of
the text: tries that find nothing are paid for by the text that has come since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tool_parsers.engine import Engine, run
from tool_parsers.result import Parsed, ToolCall
from tool_parsers.schema import Tools
from tool_parsers.spec import Format, Start
from tool_parsers.text import Text

_WORK_PER_CHARACTER = 8


class Stream:
    """One turn arriving in pieces."""

    def __init__(self, form: Format, tools: Sequence[Any] | Tools | None, start: Start | None, strict: bool) -> None:
        self._form = form
        self._tools = Tools.of(tools)
        self._start = start
        self._strict = strict
        self._text = ""
        self._settled = 0
        """Everything before this place has been given out."""
        self._work = 0
        self._early = form.adapt is None and form.segments is None and start is not None

    def feed(self, piece: str) -> list[ToolCall]:
        """Add text; returns the calls that became certain with it."""
        self._text += piece
        pending = len(self._text) - self._settled
        if not self._early or not piece or self._work + pending > _WORK_PER_CHARACTER * len(self._text):
            return []
        self._work += pending
        # After a first call the turn is past its thinking: an orphan closer can no longer change what came before.
        engine = Engine(self._form, Text(self._text[self._settled :]), self._tools, self._start, self._strict)
        calls, end = engine.settled(resumed=self._settled > 0)
        offset = self._settled
        self._settled += end
        return [replace(call, span=(call.span[0] + offset, call.span[1] + offset)) for call in calls]

    def finish(self) -> Parsed:
        """The whole turn."""
        return run(self._form, self._text, self._tools, self._start, self._strict)
