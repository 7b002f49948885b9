"""The one loop behind every format: thinking is split off, calls are read one by one, the rest is text.

Nothing here raises on any text, and every stretch of it ends up in exactly one place: reasoning, a call, an error,
content or trailing text (structure markers aside).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tool_parsers.readers.headed import read_arguments
from tool_parsers.readers.tagged import Tagged
from tool_parsers.schema import Tools
from tool_parsers.spec import Format, Malformed, Parsed, Reading, Scan, Segment, Start, ToolCall
from tool_parsers.text import Text

SHORTEST_CUT = 4
"""Less of a marker may as well be text."""
_EMPTY_CALL = re.compile(r"(?:<[^<>\s]{1,64}>\s*+<[^<>\s]{1,64}>|\[[A-Z_]{1,32}\])\s*+")


@dataclass
class _Turn:
    """What has been collected so far."""

    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    written: list[str] = field(default_factory=list)
    """Text and the text of calls, in order."""
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    errors: list[Malformed] = field(default_factory=list)

    def add_text(self, text: str) -> None:
        """Take text: content before the first call, trailing after it."""
        self.written.append(text)
        (self.after if self.calls else self.before).append(text)

    def add(self, reading: Reading, raw: str, start: int) -> None:
        """Take a reading; what has no readable name stays visible as text, unless it is nothing but markers."""
        if reading.calls:
            self.written.append(raw[start : reading.end])
        elif not _EMPTY_CALL.fullmatch(raw, start, reading.end):
            self.add_text(raw[start : reading.end])
        self.calls.extend(reading.calls)
        self.errors.extend(reading.errors)

    def restart_after_thinking(self, thought: str) -> None:
        """A closer without opener: all that came before was thinking."""
        self.before, self.after, self.written, self.calls, self.errors = [], [], [], [], []
        self.reasoning = [thought]


def _clean(reading: Reading) -> bool:
    """Whether everything in a reading was there and needed no guessing."""
    whole = all(call.ok and call.complete and not call.repaired for call in reading.calls)
    return whole and bool(reading.calls) and not reading.errors


class Engine:
    def __init__(self, form: Format, text: Text, tools: Tools, start: Start | None, strict: bool) -> None:
        self.form = form
        self.text = text
        self.start = start
        self.scan = Scan(text, tools, text.length, strict)
        self.turn = _Turn()

    def run(self) -> Parsed:
        if self.form.segments is not None:
            for segment in self.form.segments(self.text, self.start):
                self._segment(segment)
        else:
            self._thinking_and_calls()
        return self._assemble()

    # -- message-structured formats

    def _segment(self, segment: Segment) -> None:
        raw = self.text.raw
        if segment.kind == "reasoning":
            self.turn.reasoning.append(raw[segment.start : segment.end])
        elif segment.kind == "content":
            told = any(part.strip() for part in (*self.turn.before[-1:], *self.turn.after[-1:]))
            self.turn.add_text((self.form.between if told else "") + raw[segment.start : segment.end])
        elif segment.kind == "call":
            self.turn.add(self._named_call(segment), raw, segment.opened)
        else:
            self.scan.end = segment.end
            self._calls(segment.start, segment.end, thinking=False)
            self.scan.end = self.text.length

    def _named_call(self, segment: Segment) -> Reading:
        if isinstance(self.form.reader, Tagged):
            return self.form.reader.read_parameters(self.scan, segment)
        return read_arguments(self.scan, segment)

    # -- tag-structured formats

    def _thinking_and_calls(self) -> None:
        place = self.text.skip_blanks(0)
        if self.start == "reasoning" and self.form.reasoning is not None:
            opener = next((o for o in self.form.reasoning.openers if self.text.at(o, place)), "")
            if not any(self.text.at(marker, place) for marker in self.form.reasoning.skipped_by):
                place = self._think(place + len(opener) if opener else 0)
        else:
            place = 0
        self._calls(place, self.text.length, thinking=self.form.reasoning is not None)

    def _calls(self, place: int, end: int, *, thinking: bool) -> None:
        """Read text and calls from `place` to `end`, entering thinking blocks where they open."""
        text_from = place
        while place < end and not self.scan.exhausted:
            call = self._next_call(place)
            opened, opener = self._next_thought(place) if thinking else (-1, "")
            if thinking and self._orphan_closer(place, call, opened):
                place = text_from = self._end_orphan_thought(place)
            elif opened >= 0 and (call < 0 or opened < call):
                self.turn.add_text(self.text.raw[text_from:opened])
                place = text_from = self._think(opened + len(opener))
            elif call >= 0:
                place, text_from = self._call(call, text_from)
            else:
                break
        if self.scan.exhausted and place < end:
            message = "The text repeats broken calls; what follows was not read."
            self.turn.errors.append(Malformed(message, "", (place, end)))
        self.turn.add_text(self.text.raw[text_from:end])

    def _call(self, call: int, text_from: int) -> tuple[int, int]:
        """Read the call at this place; returns where reading goes on and where pending text begins."""
        reading = self.form.reader.read(self.scan, call) if self.form.reader else None
        if reading is None or reading.end <= call:
            self.scan.misses += 1
            return call + 1, text_from
        self.turn.add_text(self.text.raw[text_from:call])
        self.turn.add(reading, self.text.raw, call)
        return reading.end, reading.end

    def _next_call(self, place: int) -> int:
        found = self.form.reader.find(self.scan, place) if self.form.reader else -1
        return found if found < self.scan.end else -1

    def _next_thought(self, place: int) -> tuple[int, str]:
        reasoning = self.form.reasoning
        return self.text.first(reasoning.openers, place) if reasoning else (-1, "")

    def _orphan_closer(self, place: int, call: int, opened: int) -> bool:
        """Whether a closer comes next although nothing opened: the prompt had opened the thinking."""
        reasoning = self.form.reasoning
        if (
            reasoning is None
            or not reasoning.orphan_closer
            or self.turn.reasoning
            or (self.start == "content" and self.turn.calls)
        ):
            return False
        closer, _ = self.text.first(reasoning.closers, place)
        return closer >= 0 and (call < 0 or closer < call) and (opened < 0 or closer < opened)

    def _end_orphan_thought(self, place: int) -> int:
        assert self.form.reasoning is not None
        closer, marker = self.text.first(self.form.reasoning.closers, place)
        self.turn.restart_after_thinking(self.text.raw[:closer])
        return closer + len(marker)

    def _think(self, inside: int) -> int:
        """Take the thinking block that begins at `inside`; returns where reading goes on."""
        reasoning = self.form.reasoning
        assert reasoning is not None
        closer, marker = self._closer(inside)
        if reasoning.transparent:
            call = self._next_call(inside)
            if call >= 0 and (closer < 0 or call < closer):
                self.turn.reasoning.append(self.text.raw[inside:call])
                return call
        if closer >= 0:
            self.turn.reasoning.append(self.text.raw[inside:closer])
            return closer + len(marker)
        call = self._next_call(inside)
        if call >= 0 and (reasoning.implicit_end or self._ends_in_calls(call)):
            self.turn.reasoning.append(self.text.raw[inside:call])
            return call
        self.turn.reasoning.append(self.text.raw[inside:])
        return self.text.length

    def _closer(self, inside: int) -> tuple[int, str]:
        """The closer of a thinking block; one inside the arguments of a finished call is data."""
        assert self.form.reasoning is not None
        closer, marker = self.text.first(self.form.reasoning.closers, inside)
        if self.form.reader is None:
            return closer, marker
        place, faults = inside, self.scan.faults
        while closer >= 0 and not self.scan.exhausted:
            call = self._next_call(place)
            if call < 0 or call > closer:
                break
            reading = self.form.reader.read(self.scan, call)
            place = max(reading.end, call + 1) if reading else call + 1
            # A reading that runs on into the next call has swallowed the closer, not quoted it.
            swallowed = closer < self._next_call(closer) < place
            if reading is not None and place > closer and _clean(reading) and not swallowed:
                closer, marker = self.text.first(self.form.reasoning.closers, place)
        self.scan.faults = faults
        return closer, marker

    def _ends_in_calls(self, call: int) -> bool:
        """Whether the text from this call on is nothing but good calls, blanks and structure."""
        assert self.form.reader is not None
        rest: list[str] = []
        faults = self.scan.faults
        while call >= 0:
            reading = self.form.reader.read(self.scan, call)
            if reading is None or not reading.calls or not all(c.ok for c in reading.calls):
                self.scan.faults = faults
                return False
            following = self._next_call(reading.end)
            rest.append(self.text.raw[reading.end : following if following >= 0 else self.text.length])
            call = following
        return not self._without_structure("".join(rest)).strip()

    # -- putting it together

    def _assemble(self) -> Parsed:
        turn, form = self.turn, self.form
        if turn.calls and form.segments is None and not any(call.ok for call in turn.calls):
            self._keep_text_of_broken_calls()
        closers = form.reasoning.closers if form.reasoning else ()
        if turn.reasoning:
            turn.reasoning[-1] = self._without_cut_marker(turn.reasoning[-1], (*form.structure, *closers))
        before = self._without_structure(self._without_cut_marker("".join(turn.before), form.structure))
        after = self._without_structure(self._without_cut_marker("".join(turn.after), form.structure))
        clean = form.clean or (lambda text: text)
        content, trailing = self._trimmed(before, after)
        thoughts = [self._without_structure(thought).strip("\n") for thought in turn.reasoning]
        return Parsed(
            content=clean(content),
            trailing=clean(trailing),
            reasoning=clean("\n".join(thought for thought in thoughts if thought.strip())),
            calls=tuple(turn.calls),
            errors=tuple(turn.errors),
        )

    def _keep_text_of_broken_calls(self) -> None:
        """With no call that can run, the turn is text: content keeps what the model wrote, calls included."""
        self.turn.before = self.turn.written
        self.turn.after = []

    def _trimmed(self, before: str, after: str) -> tuple[str, str]:
        if self.form.joined:
            before, after = before + after, ""
        if self.turn.reasoning:
            before = before.lstrip("\n")
        if any(call.ok for call in self.turn.calls):
            if self.form.trim == "strip":
                before, after = before.strip(), after.strip()
            elif self.form.trim == "newlines":
                before, after = before.strip("\n"), after.strip("\n")
            else:
                before = before.removesuffix(self.form.trim_exactly)
        return (before if before.strip() else ""), (after if after.strip() else "")

    def _without_cut_marker(self, text: str, markers: tuple[str, ...]) -> str:
        """Without the beginning of a marker that the end of the text cut off."""
        for marker in markers:
            for size in range(len(marker) - 1, SHORTEST_CUT - 1, -1):
                if text.endswith(marker[:size]) and self.text.raw.endswith(marker[:size]):
                    return text[:-size]
        return text

    def _without_structure(self, text: str) -> str:
        for marker in self.form.structure:
            text = text.replace(marker, "")
        return text


@dataclass(frozen=True)
class Parser:
    """One format, ready to parse."""

    form: Format
    strict: bool = False

    @property
    def name(self) -> str:
        """The canonical name of the format."""
        return self.form.name

    def parse(self, text: str, tools: Sequence[Any] | Tools | None = None, start: Start | None = "content") -> Parsed:
        """Take one assistant turn apart; never raises on any text.

        `tools` are OpenAI's schemas, or what `Tools.of` read from them. `start` says where the prompt left off:
        `content`, `reasoning` (the prompt opened the thinking), `header` (message-structured formats), or None when
        that is not known.
        """
        located, form = Text(text), self.form
        while form.adapt is not None:
            form = form.adapt(located)
        return Engine(form, located, Tools.of(tools), start, self.strict).run()
