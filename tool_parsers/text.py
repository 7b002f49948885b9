"""Text with every marker located once, so that no search ever walks the same stretch twice.

A plain `str.find` per opener is quadratic when the closer it looks for is missing; here each literal or pattern is
indexed on first use and looked up by bisection afterwards.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable

_BLANKS = re.compile(r"\s*+")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")

REPLACEMENT = "�"


def without_lone_surrogates(text: str) -> str:
    """The same text, same length, with every unencodable code point replaced."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _LONE_SURROGATE.sub(REPLACEMENT, text)
    return text


class Text:
    """One input with its marker index."""

    def __init__(self, raw: str) -> None:
        self.raw = without_lone_surrogates(raw)
        self.length = len(self.raw)
        self._literals: dict[str, list[int]] = {}
        self._patterns: dict[re.Pattern[str], tuple[list[int], list[re.Match[str]]]] = {}
        self._structural: dict[tuple[str, re.Pattern[str]], list[int]] = {}

    def find(self, marker: str, start: int = 0) -> int:
        """Position of the marker at or after `start`, or -1."""
        places = self._places(marker)
        at = bisect_left(places, start)
        return places[at] if at < len(places) else -1

    def first(self, markers: Iterable[str], start: int = 0) -> tuple[int, str]:
        """The earliest of the markers (the longest where two begin together), or (-1, '')."""
        best, found = -1, ""
        for marker in markers:
            place = self.find(marker, start)
            if place >= 0 and (best < 0 or place < best or (place == best and len(marker) > len(found))):
                best, found = place, marker
        return best, found

    def search(self, pattern: re.Pattern[str], start: int = 0) -> re.Match[str] | None:
        """The first of the pattern's non-overlapping matches that begins at or after `start`."""
        if pattern not in self._patterns:
            matches = list(pattern.finditer(self.raw))
            self._patterns[pattern] = ([match.start() for match in matches], matches)
        places, matches = self._patterns[pattern]
        at = bisect_left(places, start)
        return matches[at] if at < len(matches) else None

    def find_structural(self, closer: str, followers: re.Pattern[str], start: int) -> int:
        """The first closer at or after `start` that is followed, after blanks, by a follower or the end of text.

        A closer anywhere else is part of a value: this one rule keeps `</parameter>` and its like inside arguments.
        """
        key = (closer, followers)
        if key not in self._structural:
            size = len(closer)
            self._structural[key] = [p for p in self._places(closer) if self._followed(p + size, followers)]
        places = self._structural[key]
        at = bisect_left(places, start)
        return places[at] if at < len(places) else -1

    def count(self, markers: Iterable[str], start: int, end: int) -> int:
        """How many of the markers begin in this stretch."""
        ranges = (self._places(marker) for marker in markers)
        return sum(bisect_left(places, end) - bisect_left(places, start) for places in ranges)

    def count_matches(self, pattern: re.Pattern[str], start: int, end: int) -> int:
        """How many of the pattern's matches begin in this stretch."""
        self.search(pattern)
        places, _ = self._patterns[pattern]
        return bisect_left(places, end) - bisect_left(places, start)

    def skip_blanks(self, start: int) -> int:
        """Position of the first non-blank at or after `start`."""
        match = _BLANKS.match(self.raw, start)
        return match.end() if match else start

    def at(self, marker: str, place: int) -> bool:
        """Whether the marker stands at this place."""
        return self.raw.startswith(marker, place)

    def _followed(self, place: int, followers: re.Pattern[str]) -> bool:
        place = self.skip_blanks(place)
        return place >= self.length or followers.match(self.raw, place) is not None

    def _places(self, marker: str) -> list[int]:
        if marker not in self._literals:
            places = []
            place = self.raw.find(marker)
            while place >= 0:
                places.append(place)
                place = self.raw.find(marker, place + 1)
            self._literals[marker] = places
        return self._literals[marker]
