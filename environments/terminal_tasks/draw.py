"""Seeded choice of names, words and numbers. Training and evaluation draw file and folder names from disjoint lists."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import TypeVar

import yaml

T = TypeVar("T")


@cache
def vocabulary() -> dict[str, dict[str, list[str]]]:
    """The word lists: list name -> split or `any` -> words."""
    text = (files("environments.terminal_tasks") / "vocabulary.yaml").read_text(encoding="utf-8")
    loaded: dict[str, dict[str, list[str]]] = yaml.safe_load(text)
    return loaded


class Draw:
    """One task's source of chance. Names are handed out once, so that two files of a task never collide."""

    def __init__(self, split: str, seed: str) -> None:
        self._random = random.Random(f"{split}/{seed}")
        self._split = split
        self._left: dict[str, list[str]] = {}

    def pick(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Some of the options, each at most once."""
        return self._random.sample(options, count)

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self._random.sample(items, len(items))

    def number(self, low: int, high: int) -> int:
        """A whole number from low to high, both included."""
        return self._random.randint(low, high)

    def numbers(self, count: int, low: int, high: int) -> list[int]:
        """Distinct whole numbers."""
        return self._random.sample(range(low, high + 1), count)

    def file(self, extension: str | None = None) -> str:
        """A file name not used yet in this task."""
        return self._take("files") + (extension or self.pick((".txt", ".md", ".log", ".dat")))

    def folder(self) -> str:
        """A folder name not used yet in this task."""
        return self._take("folders")

    def word(self) -> str:
        """A plain lower-case word not used yet in this task."""
        return self._take("words")

    def words(self, count: int) -> list[str]:
        """Words not used yet in this task."""
        return [self.word() for _ in range(count)]

    def person(self) -> str:
        """A first name not used yet in this task."""
        return self._take("people")

    def city(self) -> str:
        """A city not used yet in this task."""
        return self._take("cities")

    def sentences(self, count: int, length: int = 4) -> list[str]:
        """Lines of a few words that may share words; no two are the same."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[" ".join(self.sample(vocabulary()["words"]["any"], length))] = None
        return list(found)

    def _take(self, name: str) -> str:
        if name not in self._left:
            lists = vocabulary()[name]
            self._left[name] = self.shuffled(lists["any"] if "any" in lists else lists[self._split])
        return self._left[name].pop()


def text(lines: Sequence[object]) -> str:
    """Lines as a text file."""
    return "".join(f"{line}\n" for line in lines)
