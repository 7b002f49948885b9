"""Grammar G: Python-like calls."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from tool_parsers.pyliteral import PythonFault, PythonReader
from tool_parsers.readers.json_calls import JsonCalls
from tool_parsers.spec import Format, Reading, Scan

_CALL_AHEAD = re.compile(r"\s*+[A-Za-z_][\w.\-]{0,255}+\s{0,20}+\(")
_BARE_LIST = re.compile(r"\[\s*+[A-Za-z_][\w.\-]{0,255}+\s{0,20}+\(\s*+(?:\)|[A-Za-z_]\w{0,255}+\s{0,20}+=)")
_NEXT_CALL = re.compile(r"(?<=[,\n\]])\s*+[A-Za-z_][\w.\-]{0,255}+\s{0,20}+\(\s*+(?:\)|[A-Za-z_]\w{0,255}+\s{0,20}+=)")
_SEPARATORS = re.compile(r"[\s,;\[]*+")


@dataclass(frozen=True)
class PythonCalls:
    """Keyword calls after an opener, or as a bare list at any place of the text."""

    openers: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    bare: bool = False
    """Whether a list of calls counts without an opener."""

    @cached_property
    def json(self) -> JsonCalls:
        """For models that write a JSON list between the same markers."""
        return JsonCalls(self.openers, self.closers)

    def find(self, scan: Scan, start: int) -> int:
        """The next opener, or the next bare list."""
        place, _ = scan.first(self.openers, start)
        if self.bare:
            match = scan.text.search(_BARE_LIST, start)
            if match is not None and match.start() < scan.end and (place < 0 or match.start() < place):
                return match.start()
        return place

    def read(self, scan: Scan, start: int) -> Reading | None:
        """Read every call of the list."""
        opener = next((o for o in self.openers if scan.text.at(o, start)), "")
        inside = start + len(opener)
        first = scan.text.skip_blanks(inside)
        after_bracket = scan.text.skip_blanks(first + 1) if scan.text.at("[", first) else first
        if opener and scan.text.at("{", after_bracket):
            return self.json.read_body(scan, start, inside)
        reading = Reading(first)
        place = first
        while True:
            separators = _SEPARATORS.match(scan.text.raw, place, scan.end)
            at = separators.end() if separators else place
            if scan.exhausted or not _CALL_AHEAD.match(scan.text.raw, at, scan.end):
                break
            place = self._one(scan, at, reading)
            if not opener and scan.text.at("]", scan.text.skip_blanks(place)):
                break
        return self._finish(scan, start, place, opener, reading)

    def _one(self, scan: Scan, at: int, reading: Reading) -> int:
        """Read one call; a broken one ends where the next begins."""
        reader = PythonReader(scan.text.raw, at, scan.end)
        name = reader.name()
        try:
            arguments = reader.keywords()
        except PythonFault as fault:
            return self._broken(scan, at, name, fault, reading)
        call = scan.call(name, arguments, (at, reader.place), repaired=reader.repairs)
        reading.calls.append(call)
        return reader.place

    def _broken(self, scan: Scan, at: int, name: str, fault: PythonFault, reading: Reading) -> int:
        stop, _ = scan.first((*self.closers, *self.openers), at)
        stop = stop if stop >= 0 else scan.end
        following = scan.text.search(_NEXT_CALL, max(at + 1, min(fault.at, stop)))
        end = following.start() if following is not None and following.start() < stop else stop
        cut = fault.cut and end == scan.end
        error = f"The call `{name}` is not written as `{name}(key=value, ...)`: {fault}."
        if cut:
            error = f"The call `{name}` was cut off before it was complete."
        reading.calls.append(scan.call(name, {}, (at, end), complete=not cut, error=error))
        return end

    def _finish(self, scan: Scan, start: int, place: int, opener: str, reading: Reading) -> Reading | None:
        after = scan.text.skip_blanks(min(place, scan.end))
        listed = scan.text.at("]", after)
        end, closed = self._close(scan, after + 1 if listed else min(place, scan.end), opener)
        if not reading.calls:
            return self._empty(scan, start, end, opener)
        if not opener and not (listed and self._stands_alone(scan, start, end)):
            return None
        last = reading.calls[-1]
        complete = last.complete and (closed or listed or not opener)
        span = (start, end) if len(reading.calls) == 1 else last.span
        reading.calls[-1] = scan.call(
            last.name, last.arguments, span, complete=complete, repaired=last.repaired, error=last.error
        )
        reading.end = end
        return reading

    def _close(self, scan: Scan, end: int, opener: str) -> tuple[int, bool]:
        """Past the closing marker, if it comes before the next opener."""
        closer, marker = scan.first(self.closers, end)
        following, _ = scan.first(self.openers, end)
        if opener and closer >= 0 and (following < 0 or closer < following):
            return closer + len(marker), True
        return end, False

    @staticmethod
    def _stands_alone(scan: Scan, start: int, end: int) -> bool:
        """A bare list is a call at the beginning or the end of the text; inside a sentence it is an example."""
        text = scan.text
        after = text.skip_blanks(end)
        return text.skip_blanks(0) >= start or after >= scan.end or text.at("<|", after)

    @staticmethod
    def _empty(scan: Scan, start: int, end: int, opener: str) -> Reading | None:
        if not opener:
            return None
        message = "The call is empty or not written as `name(key=value, ...)`."
        return Reading(max(end, start + len(opener)), errors=[scan.malformed(message, (start, end))])


FORMATS = (
    Format(
        "pythonic",
        PythonCalls(("<|python_start|>",), ("<|python_end|>",), bare=True),
        joined=True,
        trim="verbatim",
        models="Llama 3.2 pythonic, ToolACE",
    ),
    Format(
        "llama4_pythonic",
        PythonCalls(("<|python_start|>",), ("<|python_end|>",), bare=True),
        structure=("<|eom|>", "<|eot|>"),
        joined=True,
        trim="verbatim",
        models="Llama 4",
    ),
    Format("olmo3", PythonCalls(("<function_calls>",), ("</function_calls>",), bare=True), models="OLMo 3"),
    Format(
        "lfm2",
        PythonCalls(("<|tool_call_start|>",), ("<|tool_call_end|>",)),
        aliases=("lfm2_5", "lfm"),
        trim="strip",
        models="LFM2, LFM2.5",
    ),
)
