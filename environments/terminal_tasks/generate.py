"""Tasks from seeds: an endless, repeatable stream for training and a fixed one for evaluation.

Training and evaluation share no wording, no file or folder name, and evaluation has kinds that training never sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files

import yaml

from environments.terminal_tasks.draw import Draw
from environments.terminal_tasks.kinds import KINDS, Kind
from environments.terminal_tasks.terminal_task import TerminalTask
from sandbox_pool.errors import did_you_mean

SPLITS = ("train", "eval")


@cache
def wordings() -> dict[str, dict[str, list[str]]]:
    """Kind -> split -> wordings, from the data files."""
    found: dict[str, dict[str, list[str]]] = {}
    folder = files("environments.terminal_tasks") / "wordings"
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".yaml"):
            found.update(yaml.safe_load(entry.read_text(encoding="utf-8")))
    return found


def make_task(kind: str, split: str, seed: int | str) -> TerminalTask:
    """The task of this kind for this seed; the same arguments always give the same task."""
    family = _known(kind, tuple(KINDS), "kind")
    _known(split, SPLITS, "split")
    chosen = KINDS[family]
    if chosen.held_out and split == "train":
        raise ValueError(f"kind {kind!r} is held out: only the eval split has it")
    draw = Draw(split, f"{kind}/{seed}")
    wording = draw.pick(wordings()[kind][split])
    plan = chosen.make(draw)
    return TerminalTask(
        id=f"terminal:{split}:{kind}:{seed}",
        kind=kind,
        category=chosen.category,
        level=chosen.level,
        split=split,
        held_out_kind=chosen.held_out,
        prompt=wording.format(**plan.asks),
        files=tuple(plan.files.items()),
        commands=plan.commands,
        checks=plan.all_checks(),
        solution=plan.solution,
    )


def task_from_id(task_id: str) -> TerminalTask:
    """The task a stored record names."""
    parts = task_id.split(":")
    if len(parts) != 4 or parts[0] != "terminal":
        raise ValueError(f"{task_id!r} is not the id of a terminal task (terminal:SPLIT:KIND:SEED)")
    return make_task(parts[2], parts[1], parts[3])


class TerminalTasks:
    """A stream of tasks: item `i` is a function of the settings and `i` alone, so a run can be resumed anywhere."""

    def __init__(
        self,
        split: str = "train",
        *,
        levels: Sequence[int] = (),
        categories: Sequence[str] = (),
        kinds: Sequence[str] = (),
        seed: int = 0,
    ) -> None:
        """Empty selections mean everything; a selection that leaves nothing is refused."""
        _known(split, SPLITS, "split")
        for category in categories:
            _known(category, tuple({k.category for k in KINDS.values()}), "category")
        for kind in kinds:
            _known(kind, tuple(KINDS), "kind")
        wanted = (tuple(levels), tuple(categories), tuple(kinds))
        self.split = split
        self.seed = seed
        self.kinds: tuple[Kind, ...] = tuple(kind for kind in KINDS.values() if _chosen(kind, split, *wanted))
        if not self.kinds:
            raise ValueError(f"no {split} task kind has all of levels, categories, kinds {wanted}")

    def __getitem__(self, index: int) -> TerminalTask:
        """Task number `index`; each run through all kinds goes in another order."""
        if index < 0:
            raise IndexError("tasks are numbered from 0")
        epoch, place = divmod(index, len(self.kinds))
        order = Draw(self.split, f"order/{self.seed}/{epoch}").shuffled(self.kinds)
        return make_task(order[place].name, self.split, f"{self.seed}.{epoch}")

    def __iter__(self) -> Iterator[TerminalTask]:
        """Tasks without end."""
        index = 0
        while True:
            yield self[index]
            index += 1


def _chosen(
    kind: Kind, split: str, levels: tuple[int, ...], categories: tuple[str, ...], kinds: tuple[str, ...]
) -> bool:
    wanted = ((kind.level, levels), (kind.category, categories), (kind.name, kinds))
    return (split == "eval" or not kind.held_out) and all(not options or value in options for value, options in wanted)


def _known(name: str, options: Sequence[str], what: str) -> str:
    if name not in options:
        raise ValueError(f"unknown terminal task {what} {name!r}; {did_you_mean(name, options)}")
    return name
