"""Markdown as the tests of the documents see it: headings, links, and fenced blocks with the comment above each.

A block is run unless the line before its fence is a comment: `<!-- not run: WHY -->` says what it would need, and
`<!-- file: NAME -->` saves it under that name for the blocks after it.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(
    r"(?:<!-- (?P<kind>not run|file): (?P<value>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.*?) *$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    not_run: str = ""
    file: str = ""


def blocks(page: Path) -> list[Block]:
    found = FENCE.finditer(page.read_text())
    return [
        Block(
            match["language"],
            match["text"],
            not_run=match["value"] if match["kind"] == "not run" else "",
            file=match["value"] if match["kind"] == "file" else "",
        )
        for match in found
    ]


def links(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text())
    return LINK.findall(text)


def anchors(page: Path) -> set[str]:
    """What can stand behind # in a link, as GitHub makes it of headings."""
    seen: Counter[str] = Counter()
    made: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        made.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return made
