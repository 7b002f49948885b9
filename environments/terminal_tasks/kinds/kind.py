"""The list of task kinds. A kind is a function from a seeded draw to a plan; its wordings are in `wordings/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from environments.terminal_tasks.draw import Draw
from environments.terminal_tasks.terminal_task import Plan

Maker = Callable[[Draw], Plan]


@dataclass(frozen=True)
class Kind:
    """One family of tasks."""

    name: str
    category: str
    level: int
    make: Maker
    held_out: bool = False
    """Only evaluation uses it."""


KINDS: dict[str, Kind] = {}


def kind(category: str, level: int, held_out: bool = False) -> Callable[[Maker], Maker]:
    """Register a function of this package as the kind of its own name."""

    def register(make: Maker) -> Maker:
        name = make.__name__
        if name in KINDS:
            raise ValueError(f"two terminal task kinds are named {name!r}")
        KINDS[name] = Kind(name, category, level, make, held_out)
        return make

    return register
