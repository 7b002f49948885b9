"""Are the items of an environment sound? Plays solutions, no-ops and saboteurs, and judges the verdicts.

Every round is a fresh environment over one pool, and goes through the items in another order: the first as they come,
the second backwards, further ones shuffled. A round plays each item's solution and a no-op. The first also verifies one
snapshot several times and plays the saboteurs. An item whose verdicts change from round to round is then played alone:
verdicts that agree there depend on what ran before, others are flaky. Faults of slots accuse nobody.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agent_loop.local_models.standin.solver import checked_steps
from environments.base import HermesAgentBaseEnv
from environments.errors import ConfigError, UsageError
from environments.rollouts.quarantine import quarantine_text
from environments.rollouts.trials import Attempt, Script, Trials
from environments.runs.intervals import wilson
from environments.runs.progress import Progress, Tally
from environments.runs.store import append_bytes, whole_lines, write_whole
from sandbox_pool.errors import SandboxError

log = logging.getLogger(__name__)

SABOTEURS = ("exit_early", "forge", "daemon")
SAME_SCORE = 1e-9
ALONE = -1
"""Round of an item that was played with nothing before it."""
PROGRAMS = (
    "find . -type f \\( -name '*.py' -o -name '*.sh' -o -name '*.js' -o -name '*.mjs' -o -name '*.rb' -o -name '*.pl' "
    "\\) -size -1024k -not -path './.git/*' -exec sha256sum {} + 2> /dev/null | sort"
)


@dataclass
class Observation:
    """What one item did in one round. A score is None where nothing was played."""

    item_id: str
    round: int
    solution: float | None = None
    """None when the environment knows no solution."""
    solution_error: str = ""
    no_op: float | None = None
    repeats: list[float] = field(default_factory=list)
    """Scores of one snapshot, verified again and again."""
    saboteurs: dict[str, float] = field(default_factory=dict)
    broken: str = ""
    """An error of `prepare` or of `compute_reward`."""
    lost: str = ""
    """A fault of the slots: nothing is known about the item."""


@dataclass(frozen=True)
class Finding:
    """What is known about one item."""

    item_id: str
    faults: tuple[str, ...]
    solution: str
    """Passes of plays, `-` without a known solution."""
    no_op: str
    repeats: str
    """How many of the verifications of one snapshot agree with the first."""
    saboteurs: str
    lost: str = ""

    @property
    def reason(self) -> str:
        return "; ".join(self.faults)


@dataclass(frozen=True)
class Validation:
    """All findings, and how often items are flaky."""

    environment: str
    findings: tuple[Finding, ...]

    @property
    def accused(self) -> dict[str, str]:
        """Item -> why it should not be used."""
        return {finding.item_id: finding.reason for finding in self.findings if finding.faults}

    def rate(self, *kinds: str) -> tuple[int, int, tuple[float, float]]:
        """Items with one of these faults, items that could be judged, and the 95 % interval of the share."""
        judged = [finding for finding in self.findings if not finding.lost]
        hits = sum(any(fault.startswith(kinds) for fault in finding.faults) for finding in judged)
        return hits, len(judged), wilson(hits, len(judged))


@dataclass
class _Played(Tally):
    """Counts items of rounds instead of groups."""

    def line(self) -> str:
        return f"{self.done}/{self.total} items played, {self.per_minute:.0f}/min"


MakeEnv = Callable[[], HermesAgentBaseEnv]


@dataclass
class Validator:
    """Runs the rounds and stores every observation, so that a stopped run goes on where it was."""

    make_env: MakeEnv
    """A fresh environment each time, all over the same open pool."""
    path: Path
    """Observations, one JSON line each."""
    rounds: int = 3
    limit: int = 64
    split: str = "train"
    at_once: int = 4
    _known: dict[tuple[str, int], Observation] = field(default_factory=dict, init=False)

    async def run(self, progress: Progress) -> Validation:
        """Play what is not stored yet, and judge."""
        self._known = {(found.item_id, found.round): found for found in _stored(self.path)}
        env = self.make_env()
        items = await self._items(env)
        tally = _Played(len(items) * self.rounds)
        for number in range(self.rounds):
            await self._round(number, items, tally, progress)
        solved_at, name = env.config.rewards.solved_at, str(env.name)
        await self._play_suspects_alone(items, solved_at)
        by_item = {item: [found for found in self._known.values() if found.item_id == item] for item in items}
        return Validation(name, tuple(judge(item, found, solved_at) for item, found in by_item.items()))

    async def _items(self, env: HermesAgentBaseEnv) -> dict[str, Any]:
        """The items by id: the evaluation items, or training items until one comes again."""
        await env.setup()
        if self.split == "eval":
            return {env.item_id(item): item for item in list(await env.evaluation_items())[: self.limit]}
        items: dict[str, Any] = {}
        while len(items) < self.limit and (item := await env.get_next_item()) is not None:
            if env.item_id(item) in items:
                break
            items[env.item_id(item)] = item
        if not items:
            raise ConfigError(f"{env.name} has no items")
        return items

    async def _round(self, number: int, items: Mapping[str, Any], tally: Tally, progress: Progress) -> None:
        order = list(items)
        if number == 1:
            order.reverse()
        elif number > 1:
            random.Random(number).shuffle(order)
        env = self.make_env()
        await env.setup()
        at_once = asyncio.Semaphore(self.at_once)

        async def one(item_id: str) -> None:
            async with at_once:
                if (item_id, number) not in self._known:
                    await self._keep(await self._observe(env, items[item_id], number))
                tally.done += 1
                progress.show(tally)

        async with asyncio.TaskGroup() as group:
            for item_id in order:
                group.create_task(one(item_id))

    async def _play_suspects_alone(self, items: Mapping[str, Any], solved_at: float) -> None:
        for item_id, item in items.items():
            found = [self._known[item_id, number] for number in range(self.rounds)]
            if _repeats_agree(found) and not _rounds_agree(found):
                for number in range(self.rounds):
                    if (item_id, ALONE - number) in self._known:
                        continue
                    env = self.make_env()
                    await env.setup()
                    await self._keep(await self._observe(env, item, ALONE - number))

    async def _keep(self, found: Observation) -> None:
        self._known[found.item_id, found.round] = found
        await asyncio.to_thread(append_bytes, self.path, orjson.dumps(found) + b"\n")

    async def _observe(self, env: HermesAgentBaseEnv, item: Any, number: int) -> Observation:
        found = Observation(env.item_id(item), number)
        trials = Trials(env, f"validate-{number}-{found.item_id}")
        try:
            async with trials.prepared(item) as start:
                await self._play(trials, item, start, found)
        except SandboxError as error:
            found.lost = f"{type(error).__name__}: {error}"
        except Exception as error:  # whatever the environment's own code raises is a finding about its item
            log.debug("item %s", found.item_id, exc_info=error)
            found.broken = f"{type(error).__name__}: {error}"
        return found

    async def _play(self, trials: Trials, item: Any, start: str, found: Observation) -> None:
        first = found.round == 0
        steps, programs = checked_steps(trials.env.solution(item)), ""
        if steps:
            async with trials.attempted(item, start, Script(steps, survey=PROGRAMS if first else "")) as attempt:
                found.solution = await self._score(trials, item, attempt)
                found.solution_error = attempt.failed
                if first:
                    found.repeats = [found.solution, *await self._again(trials, item, attempt)]
                    programs = _changed(attempt.surveys)
        async with trials.attempted(item, start, Script()) as attempt:
            found.no_op = await self._score(trials, item, attempt)
            if first and not steps:
                found.repeats = [found.no_op, *await self._again(trials, item, attempt)]
        for name in SABOTEURS if first else ():
            script = Script([files("environments.runs").joinpath("saboteurs", f"{name}.sh").read_text()], programs)
            async with trials.attempted(item, start, script) as attempt:
                found.saboteurs[name] = await self._score(trials, item, attempt)

    async def _again(self, trials: Trials, item: Any, attempt: Attempt) -> list[float]:
        """Verify the same snapshot once more, for as long as the repeats go."""
        return [await self._score(trials, item, attempt) for _ in range(max(1, self.rounds - 1))]

    async def _score(self, trials: Trials, item: Any, attempt: Attempt) -> float:
        return (await trials.verified(item, attempt.result, attempt.frozen, scope=attempt.scope)).score


def _stored(path: Path) -> Iterable[Observation]:
    try:
        return [Observation(**line) for line in whole_lines(path)]
    except TypeError as error:
        raise UsageError(f"{path} was not written by validate: choose another --out, or --fresh") from error


def _changed(surveys: Sequence[str]) -> str:
    """Programs that the solution wrote or changed, one path per line."""
    if len(surveys) < 2:
        return ""
    before = set(surveys[0].splitlines())
    return "\n".join(line.split("  ", 1)[1] for line in surveys[1].splitlines() if line not in before and "  " in line)


def _same(scores: Sequence[float | None]) -> bool:
    known = [score for score in scores if score is not None]
    return not known or max(known) - min(known) <= SAME_SCORE


def _repeats_agree(found: Sequence[Observation]) -> bool:
    return all(_same(one.repeats) for one in found)


def _rounds_agree(found: Sequence[Observation]) -> bool:
    played = [one for one in found if not one.lost]
    broken = {bool(one.broken) for one in played}
    return len(broken) < 2 and _same([one.solution for one in played]) and _same([one.no_op for one in played])


def judge(item_id: str, observations: Sequence[Observation], solved_at: float) -> Finding:
    """What the observations of one item say about it."""
    played = [one for one in observations if not one.lost]
    rounds = sorted((one for one in played if one.round >= 0), key=lambda one: one.round)
    alone = [one for one in played if one.round < 0]
    lost = "; ".join(sorted({one.lost for one in observations if one.lost}))
    solutions = [one.solution for one in played if one.solution is not None]
    no_ops = [one.no_op for one in played if one.no_op is not None]
    repeats = [score for one in rounds for score in one.repeats]
    saboteurs = {name: score for one in rounds for name, score in one.saboteurs.items()}
    passes = sum(score >= solved_at for score in solutions)
    faults = []
    changing = not _rounds_agree(rounds)
    if not _repeats_agree(rounds):
        faults.append(f"flaky: one snapshot was scored {_listed(repeats)}")
    elif changing and not (alone and _rounds_agree(alone)):
        faults.append(f"flaky: the solution was scored {_listed(solutions)}, the no-op {_listed(no_ops)}")
    elif changing:
        faults.append(f"depends on the order of items: the solution was scored {_listed(solutions)}")
    elif broken := next((one.broken for one in rounds if one.broken), ""):
        faults.append(f"error: {broken}")
    elif solutions and not passes:
        why = next((one.solution_error for one in rounds if one.solution_error), "")
        faults.append(f"the solution fails{f': {why}' if why else ''}")
    if no_ops and min(no_ops) >= solved_at:
        faults.append("doing nothing passes")
    elif hacks := [name for name, score in saboteurs.items() if score >= solved_at]:
        faults.append(f"hackable: {', '.join(hacks)} passes")
    return Finding(
        item_id,
        tuple(faults) if rounds else (),
        f"{passes}/{len(solutions)}" if solutions else "-",
        _listed(sorted(set(no_ops))),
        f"{sum(abs(score - repeats[0]) <= SAME_SCORE for score in repeats)}/{len(repeats)}" if repeats else "-",
        ", ".join(f"{name} {score:g}" for name, score in saboteurs.items()),
        lost,
    )


def _listed(scores: Sequence[float]) -> str:
    return " ".join(f"{score:g}" for score in scores) or "-"


def store(found: Validation, folder: Path, quarantine: Path | None = None) -> Path:
    """Write the findings and the quarantine list; where that list is."""
    listed = quarantine or folder / "quarantine.json"
    write_whole(folder / "validation.json", orjson.dumps(asdict(found), option=orjson.OPT_INDENT_2))
    write_whole(listed, quarantine_text(found.environment, found.accused))
    return listed


def render(found: Validation) -> RenderableType:
    """The accused items as a table, and the rates below it."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("item", "solution", "no-op", "one snapshot", "verdict"):
        table.add_column(title, justify="right" if title in ("solution", "no-op", "one snapshot") else "left")
    shown = sorted(found.findings, key=lambda finding: not finding.faults)
    for finding in shown:
        verdict = finding.reason or (f"not judged: {finding.lost}" if finding.lost else "sound")
        table.add_row(finding.item_id, finding.solution, finding.no_op, finding.repeats, verdict)
    unknown = sum(finding.solution == "-" and not finding.lost for finding in found.findings)
    lines = [_rate_line("flaky", found.rate("flaky", "depends")), _rate_line("to be left out", found.rate(""))]
    if unknown:
        lines.append(f"{unknown} items have no known solution: whether they can be solved was not checked.")
    return Group(table, Text("\n".join(lines)))


def _rate_line(name: str, rate: tuple[int, int, tuple[float, float]]) -> str:
    hits, judged, (low, high) = rate
    share = 100 * hits / judged if judged else 0.0
    return f"{name}: {hits} of {judged} items ({share:.1f} %, 95 % interval {100 * low:.1f} to {100 * high:.1f} %)"


@asynccontextmanager
async def shared_pool(env: HermesAgentBaseEnv) -> AsyncIterator[Any]:
    """Slots for all rounds."""
    from sandbox_pool import SlotPool

    try:
        pool = SlotPool.from_config(env.config.pool_config())
    except ValueError as error:
        raise ConfigError(f"env.pool: {error}") from error
    async with pool:
        yield pool
