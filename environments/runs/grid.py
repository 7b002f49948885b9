"""One evaluation of several models, seeds and settings: a run for each combination, then one table and comparisons.

Every combination is a run of its own, in a folder of its own, and goes on where it stopped. Slots, budget and stop are
shared.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from agent_loop.records.record import RolloutRecord
from environments.atropos.stops import Stop
from environments.base import HermesAgentBaseEnv
from environments.config.settings import ServerConfig
from environments.consoles import new_console
from environments.errors import UsageError
from environments.runs.batch import Spending, evaluate_run
from environments.runs.comparison import compare, read_run
from environments.runs.comparison import render as render_comparison
from environments.runs.store import write_whole
from environments.runs.summary import print_summary, summarize
from environments.runs.validation import shared_pool
from sandbox_pool.errors import did_you_mean

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Combination:
    """One cell of the grid."""

    model: str
    """Empty: as the config says."""
    varied: tuple[tuple[str, str], ...]
    """Settings and their values."""
    seed: int | None

    @property
    def label(self) -> str:
        """What is compared: the model and the settings, whatever the seed."""
        return " ".join([*([self.model] if self.model else []), *(f"{key}={value}" for key, value in self.varied)])

    @property
    def folder(self) -> Path:
        """Where its run lies, in the folder of the evaluation."""
        parts = [*([self.label] if self.label else []), *([] if self.seed is None else [f"seed-{self.seed}"])]
        return Path(*(quote(part, safe=" =.-_+") for part in parts))

    def settings(self) -> list[str]:
        """Flags that make it."""
        words = [word for key, value in self.varied for word in (f"--{key}", value)]
        return words if self.seed is None else [*words, "--env.sampling_seed", str(self.seed)]


def combinations(models: str | None, seeds: int | None, vary: Sequence[str]) -> list[Combination]:
    """All cells of `--models a,b --seeds 3 --vary env.key=1,2`."""
    axes: list[list[tuple[str, str]]] = []
    for text in vary:
        key, equals, values = text.partition("=")
        if not equals or not key.startswith(("env.", "openai.")):
            raise UsageError(f"--vary {text!r}: write a setting and its values, such as env.eval_temperature=0.2,1.0")
        axes.append([(key, value) for value in _several(values, f"--vary {key}")])
    names = [""] if models is None else _several(models, "--models")
    numbers: list[int | None] = [None] if seeds is None else list(range(seeds))
    return [
        Combination(model, varied, seed) for model in names for varied in itertools.product(*axes) for seed in numbers
    ]


def _several(text: str, flag: str) -> list[str]:
    values = [value.strip() for value in text.split(",")]
    if not all(values) or len(set(values)) < len(values):
        raise UsageError(f"{flag} {text!r}: give different values, separated by commas")
    return values


def servers_of(servers: Sequence[ServerConfig], model: str) -> list[ServerConfig]:
    """The servers of a model: those of its name where the config lists several models, else all under its name."""
    names = {server.model_name for server in servers}
    if not model or names == {model}:
        return list(servers)
    if len(names) > 1:
        if model not in names:
            raise UsageError(f"--models: the config has no server of {model!r}; {did_you_mean(model, sorted(names))}")
        return [server for server in servers if server.model_name == model]
    return [server.model_copy(update={"model_name": model}) for server in servers]


MakeEnv = Callable[[Combination], HermesAgentBaseEnv]


async def evaluate_grid(cells: Sequence[Combination], make_env: MakeEnv, out: Path, fresh: bool) -> int:
    """Run every combination, print one table and the comparisons with the first; the exit code."""
    envs = [make_env(cell) for cell in cells]  # mistakes of any are found before the first runs
    code, spending = 0, Spending(envs[0], Stop())
    async with shared_pool(envs[0]) as pool:
        for cell, env in zip(cells, envs, strict=True):
            if spending.stop.draining.is_set():
                log.warning("%s was not run", cell.folder)
                code = 1
                continue
            log.info("evaluating %s", cell.folder)
            env.pool = pool
            code = max(code, await evaluate_run(env, out / cell.folder, fresh, spending))
    _sum_up(cells, out)
    log.info("used up in all: %s", spending.line())
    return code


def _sum_up(cells: Sequence[Combination], out: Path) -> None:
    by_label = {label: records for label, records in _read(cells, out) if records}
    if not by_label:
        return
    summary = summarize(record for records in by_label.values() for record in records)
    write_whole(out / "summary.json", summary.to_json())
    print_summary(summary)
    first, *others = by_label
    console = new_console(emoji=False, markup=False)
    for label in others:
        console.print(render_comparison(compare(by_label[first], by_label[label], first, label)))


def _read(cells: Sequence[Combination], out: Path) -> Iterator[tuple[str, list[RolloutRecord]]]:
    """The rollouts of each label over all its seeds, under that label."""
    for label in dict.fromkeys(cell.label for cell in cells):
        folders = [out / cell.folder for cell in cells if cell.label == label]
        records = [record for folder in folders if (folder / "rollouts.jsonl").exists() for record in read_run(folder)]
        yield label, [dataclasses.replace(record, policy=label or record.policy) for record in records]
