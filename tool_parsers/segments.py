"""Cuts message-structured formats (harmony, muse, functionary 3.2) into text, thinking and calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from tool_parsers.jsonread import Decoded, decode_strictly
from tool_parsers.spec import Segment, Start
from tool_parsers.text import Text

_HARMONY = re.compile(r"<\|(start|channel|message|constrain|end|call|return)\|>")
_RECIPIENT = re.compile(r"\bto=([^\s<|]{1,256})")
_CHANNEL = re.compile(r"<\|channel\|>\s{0,20}([A-Za-z_]{1,64})")
_HEADER_START = re.compile(r"\s*+(?:assistant)?(?:\s*+to=[^\s<|]{1,256}\s*+)?(?=<\||\Z)")
_MUSE_HEADER = re.compile(r"(?:<\|start\|>assistant\s{0,8}+)?(?:to=([^\s<|]{1,256})\s{0,8}+)?<\|message\|>")
_MUSE_END = re.compile(r"<\|(?:eom|eot)\|>")
_SECTION = re.compile(r">>>([^\s<>{]{1,256})\n")
_FIRST_SECTION = re.compile(r"\s*+([^\s<>{]{1,256})\n(?=\s*+\{)|\s*+(all)\n")

MAX_MESSAGES = 2000
"""More messages than this in one turn are a model caught in a loop: the rest is text."""


def harmony(text: Text, start: Start | None) -> list[Segment]:
    """OpenAI's harmony: headers with channel and recipient; analysis is thinking, functions are calls."""
    return list(_harmony(text, start))


def _harmony(text: Text, start: Start | None) -> Iterator[Segment]:
    place = 0
    lead = _HEADER_START.match(text.raw)
    first = text.search(_HARMONY, 0)
    if first is None or lead is None or lead.end() != first.start():
        end = first.start() if first else text.length
        yield Segment("reasoning" if start == "reasoning" else "content", 0, end)
        place = _after_end_mark(text, end)
    for _ in range(MAX_MESSAGES):
        if place >= text.length:
            return
        segment = _harmony_message(text, place)
        yield segment
        place = _after_end_mark(text, segment.end)
    yield Segment("content", place, text.length)


def _after_end_mark(text: Text, place: int) -> int:
    mark = _HARMONY.match(text.raw, place)
    return mark.end() if mark is not None and mark.group(1) in ("end", "call", "return") else max(place, 1)


def _harmony_message(text: Text, opened: int) -> Segment:
    """Read the message whose header begins at `opened`."""
    place = opened
    while (mark := text.search(_HARMONY, place)) is not None:
        if mark.group(1) == "message":
            return _harmony_body(text, opened, mark.start(), mark.end())
        ends = mark.group(1) in ("end", "call", "return") or (mark.group(1) == "start" and mark.start() > opened)
        if ends:
            return _harmony_headerless(text, opened, mark.start())
        place = mark.end()
    return _harmony_headerless(text, opened, text.length)


def _harmony_headerless(text: Text, opened: int, end: int) -> Segment:
    """A message without `<|message|>`: its body is the JSON it contains, or else it is plain text."""
    end = max(end, opened + 1)
    header = text.raw[opened : min(end, opened + 1024)]
    brace = header.find("{")
    if brace >= 0 and _RECIPIENT.search(header[:brace]):
        return _harmony_body(text, opened, opened + brace, opened + brace)
    channel = _CHANNEL.search(header)
    if channel is not None and channel.group(1) in ("final", "commentary"):
        return Segment("content", opened + channel.end(), end)
    if channel is not None or header.startswith("<|"):
        return Segment("reasoning", end, end)
    return Segment("content", opened, end)


def _harmony_body(text: Text, opened: int, header_end: int, body: int) -> Segment:
    header = text.raw[opened:header_end][-2048:]
    addressed = _RECIPIENT.findall(header)
    recipients = [name for name in addressed if name not in ("assistant", "user", "all")]
    channels = _CHANNEL.findall(header)
    if recipients:
        end, closed = _json_message_end(text, body, _HARMONY)
        name = recipients[-1].removeprefix("functions.")
        return Segment("call", body, end, name, opened, closed)
    end, _ = _message_end(text, body, _HARMONY)
    if "assistant" in addressed and channels[-1:] == ["commentary"]:
        # A note of the model to itself: no call, and nothing the user was told.
        return Segment("reasoning", end, end)
    kind = channels[-1] if channels else "final"
    return Segment("reasoning" if kind == "analysis" else "content", body, end)


def _message_end(text: Text, body: int, marks: re.Pattern[str]) -> tuple[int, bool]:
    mark = text.search(marks, body)
    while mark is not None and mark.re is _HARMONY and mark.group(1) in ("message", "constrain"):
        mark = text.search(marks, mark.end())
    return (mark.start(), True) if mark is not None else (text.length, False)


def _json_message_end(text: Text, body: int, marks: re.Pattern[str]) -> tuple[int, bool]:
    """The end of a body that is JSON: markers inside its strings are data."""
    end, closed = _message_end(text, body, marks)
    brace = text.skip_blanks(body)
    if text.raw[brace : brace + 1] == "{":
        outcome = decode_strictly(text, brace)
        if isinstance(outcome, Decoded) and outcome.end > end:
            return _message_end(text, outcome.end, marks)
    return end, closed


def muse_glimmer(text: Text, start: Start | None) -> list[Segment]:
    """Muse Glimmer: a message to nobody is for the user."""
    return _muse(text, "user")


def muse(text: Text, start: Start | None) -> list[Segment]:
    """Muse Spark: a message to nobody is thinking."""
    return _muse(text, "self")


def _muse(text: Text, nobody: str) -> list[Segment]:
    """`to=self` is thinking, `to=user` and `to=commentary` the answer; any other recipient a place where calls stand.

    A message ends at its marker, or where the header of the next one begins: models forget the marker after a thought.
    An answer that shows what a call looks like makes none, so there a tool's header is text. In a place for calls only
    the marker counts, since arguments may hold any text.
    """
    found: list[Segment] = []
    place = 0
    while place < text.length and len(found) < MAX_MESSAGES:
        header = text.search(_MUSE_HEADER, place)
        if header is not None and header.start() == text.skip_blanks(place):
            recipient, body = header.group(1) or nobody, header.end()
            header = text.search(_MUSE_HEADER, body)
        else:
            recipient, body = "user", place
        mark = text.search(_MUSE_END, body)
        end = mark.start() if mark else text.length
        kind = _muse_kind(recipient)
        while kind == "content" and header is not None and header.start() < end:
            if _muse_kind(header.group(1) or nobody) != "calls":
                break
            header = text.search(_MUSE_HEADER, header.end())
        if header is not None and header.start() < end and kind != "calls":
            end = place = header.start()
        else:
            place = mark.end() if mark else text.length
        # Nobody is told what a developer is.
        found.append(Segment(kind, end if recipient == "developer" else body, end))
    return [*found, Segment("content", place, text.length)]


def _muse_kind(recipient: str) -> Literal["content", "reasoning", "calls"]:
    if recipient in ("self", "developer"):
        return "reasoning"
    return "content" if recipient in ("user", "commentary") else "calls"


def functionary(text: Text, start: Start | None) -> list[Segment]:
    """Functionary 3.2: `>>>all` is text, `>>>name` a call; the prompt has written the first `>>>`."""
    found: list[Segment] = []
    first = _FIRST_SECTION.match(text.raw)
    place, name, opened = (first.end(), first.group(1) or first.group(2), 0) if first else (0, "all", 0)
    while True:
        body = place
        end, _ = _message_end(text, body, _SECTION)
        if name != "all":
            end, closed = _json_message_end(text, body, _SECTION)
            found.append(Segment("call", body, end, name, opened, closed))
        else:
            found.append(Segment("content", body, end))
        mark = text.search(_SECTION, end)
        if mark is None or len(found) >= MAX_MESSAGES:
            return found
        place, name, opened = mark.end(), mark.group(1), mark.start()
