"""`process` and `evaluate` of an environment: groups side by side, stored, resumed, summed up.

A run directory holds `rollouts.jsonl` (for `verify` and `view`), `sft.jsonl`, `summary.json` and the config it was made
with, secrets masked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from agent_loop.records.record import RolloutRecord
from environments.atropos.stops import Stop
from environments.config.loader import masked
from environments.config.settings import ServerConfig
from environments.errors import ConfigError, RunFailed
from environments.rollouts.cassettes import Cassettes
from environments.rollouts.rollouts import GroupResult, Rollouts
from environments.rollouts.workspaces import KeptWorkspaces
from environments.runs.progress import Progress, Tally, progress_for
from environments.runs.status import StatusFile, slot_facts
from environments.runs.store import RunDiffers, RunStore, write_whole
from environments.runs.summary import Summary, print_summary, summarize, summary_figures
from environments.runs.training_data import write_sft
from environments.trackers import TrackedProgress, tracked

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv

log = logging.getLogger(__name__)


class GroupOutcome(Protocol):
    """What running one item gives."""

    @property
    def complete(self) -> bool:
        """Whether the group has as many trainable rollouts as it should."""

    def records(self) -> Sequence[RolloutRecord]:
        """Every rollout of the group, those that infrastructure ended too."""


@dataclass(frozen=True)
class Work:
    """One item with its place in the run."""

    index: int
    item_id: str
    item: Any


class Spending:
    """Tokens and money of a run, or of several that share a budget; asks to stop when the budget is used up."""

    def __init__(self, env: HermesAgentBaseEnv, stop: Stop) -> None:
        self._budget = env.config.budget
        self.stop = stop
        self.tokens = 0
        self.usd = 0.0

    @staticmethod
    def prices(env: HermesAgentBaseEnv) -> tuple[float, float] | None:
        """US dollars per million prompt tokens and sampled tokens; None when a server has no prices."""
        found = [
            (s.usd_per_mtok_prompt, s.usd_per_mtok_sampled) for s in env.server_configs if isinstance(s, ServerConfig)
        ]
        known = [(prompt, sampled) for prompt, sampled in found if prompt is not None and sampled is not None]
        if len(known) == len(env.server_configs) > 0:
            return max(prompt for prompt, _ in known), max(sampled for _, sampled in known)
        if env.config.budget.usd is not None:
            raise ConfigError(
                "env.budget.usd needs openai.usd_per_mtok_prompt and openai.usd_per_mtok_sampled of every server"
            )
        return None

    def add(self, records: Iterable[RolloutRecord], prices: tuple[float, float] | None) -> None:
        """Count rollouts, those of an earlier start too."""
        for record in records:
            prompt = sum(turn.get("prompt_tokens") or 0 for turn in record.turns)
            sampled = sum(turn.get("sampled_tokens") or 0 for turn in record.turns)
            self.tokens += prompt + sampled
            if prices is not None:
                self.usd += (prompt * prices[0] + sampled * prices[1]) / 1e6
        budget = self._budget
        over = (budget.tokens is not None and self.tokens >= budget.tokens) or (
            budget.usd is not None and self.usd >= budget.usd
        )
        if over and not self.stop.draining.is_set():
            self.stop.ask(f"the budget is used up ({self.line()})")

    def line(self) -> str:
        return f"{self.tokens:,} tokens" + (f", {self.usd:.2f} USD" if self.usd else "")


RunGroup = Callable[[Work], Awaitable[GroupOutcome]]


async def run_all(
    work: AsyncIterator[Work], total: int, run: RunGroup, store: RunStore, progress: Progress, stop: Stop, at_once: int
) -> Tally:
    """Run what is not finished yet, `at_once` groups side by side. On a stop: start nothing new, finish what runs."""
    tally = Tally(total, done=len(store.finished), resumed=len(store.finished))
    progress.show(tally)
    running: set[asyncio.Task[None]] = set()
    stopping = asyncio.create_task(stop.now.wait())
    try:
        async for piece in work:
            if piece.index in store.finished:
                _check_same(store, piece)
                continue
            while len(running) >= at_once and not stop.draining.is_set():
                running = await _after_one(running, stopping)
            if stop.draining.is_set():
                break
            running.add(asyncio.create_task(_run_one(piece, run, store, progress, tally)))
        while running and not stop.now.is_set():
            running = await _after_one(running, stopping)
    finally:
        stopping.cancel()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return tally


async def _after_one(running: set[asyncio.Task[None]], stopping: asyncio.Task[Any]) -> set[asyncio.Task[None]]:
    await asyncio.wait({*running, stopping}, return_when="FIRST_COMPLETED")
    for task in [task for task in running if task.done()]:
        running.discard(task)
        task.result()
    return running


async def _run_one(piece: Work, run: RunGroup, store: RunStore, progress: Progress, tally: Tally) -> None:
    outcome = await run(piece)
    records = outcome.records()
    await asyncio.to_thread(store.add_group, piece.index, piece.item_id, records, outcome.complete)
    tally.done += outcome.complete
    tally.dropped += not outcome.complete
    scored = [r.verifier_score for r in records if r.trainable and r.verifier_score is not None]
    tally.rollouts += len(scored)
    tally.score_sum += sum(scored)
    tally.lost += sum(not record.trainable for record in records)
    progress.show(tally)


def _check_same(store: RunStore, piece: Work) -> None:
    stored = store.finished[piece.index]
    if stored != piece.item_id:
        raise RunDiffers(
            f"group {piece.index} of {store.directory} was item {stored}, now it is {piece.item_id}: use --fresh"
        )


IGNORED_ON_RESUME = frozenset(
    {
        "groups_at_once",
        "total_steps",
        "eval_items",
        "run_dir",
        "pool",
        "drain_timeout_s",
        "workspaces",
        "budget",
        "cassettes",
        "trackers",
    }
)
"""Settings that may change between two starts of a run without making it another run."""


async def process_run(env: HermesAgentBaseEnv, out: Path | None = None, fresh: bool = False) -> int:
    """Run `total_steps` groups of training items; exit code 1 when a group could not be completed."""
    total = env.config.total_steps
    if total < 1:
        raise ConfigError(f"env.total_steps is {total}: process needs to know how many groups to make, at least 1")

    async def items() -> AsyncIterator[Work]:
        for index in range(total):
            item = await env.next_item()
            if item is None:
                log.info("no more items after %d", index)
                return
            yield Work(index, env.item_id(item), item)

    async def run(work: Work) -> GroupResult:
        return await env.rollouts.run_group(work.item, work.index, env.config.group_size)

    with _store(env, "process", out or _directory(env, ""), fresh) as store:
        async with Rollouts(env, mode="process"):
            return await _run(env, items(), total, run, store)


async def evaluate_run(
    env: HermesAgentBaseEnv, out: Path | None = None, fresh: bool = False, spending: Spending | None = None
) -> int:
    """Run the evaluation items, `eval_samples` rollouts each; runs with the same `spending` share budget and stop."""
    with _store(env, "evaluate", out or _directory(env, "-eval"), fresh) as store:
        async with Rollouts(env, mode="evaluate"):
            return await _evaluate(env, store, spending)


async def _evaluate(env: HermesAgentBaseEnv, store: RunStore, spending: Spending | None) -> int:
    items = await env.chosen_evaluation_items()
    if not items:
        raise ConfigError(f"{env.name} has no evaluation items: write `evaluation_items`, or raise env.eval_items")

    async def works() -> AsyncIterator[Work]:
        for index, item in enumerate(items):
            yield Work(index, env.item_id(item), item)

    async def run(work: Work) -> GroupResult:
        return await env.rollouts.run_group(work.item, work.index, env.config.eval_samples, env.config.eval_temperature)

    return await _run(env, works(), len(items), run, store, spending)


async def _run(
    env: HermesAgentBaseEnv,
    works: AsyncIterator[Work],
    total: int,
    run: RunGroup,
    store: RunStore,
    spending: Spending | None = None,
) -> int:
    settings = env.config.workspaces
    if settings.keep:
        env.keep_workspace = KeptWorkspaces(store.directory / "workspaces", settings).keep
    if env.config.cassettes:
        env.cassettes = Cassettes(store.directory, env)
    spending = spending or Spending(env, Stop())
    stop, prices = spending.stop, spending.prices(env)
    spending.add(store.records(), prices)

    async def counted(work: Work) -> GroupOutcome:
        outcome = await run(work)
        spending.add(outcome.records(), prices)
        return outcome

    def facts() -> dict[str, Any]:
        return {"groups": total, **slot_facts(env.pool)}

    mode = env.rollouts.mode
    async with tracked(env.config.trackers, f"{env.name}-{mode}", store.directory, env.public_config()) as trackers:
        with stop.on_signals(), TrackedProgress(progress_for(), trackers) as progress:
            async with StatusFile(store.rollouts_path, mode, facts):
                tally = await run_all(works, total, counted, store, progress, stop, env.config.groups_at_once)
            summary = finish(env, store, tally)
        trackers.log(summary_figures(summary, mode), tally.done + tally.dropped)
    log.info("used up: %s", spending.line())
    print_summary(summary)
    if stop.draining.is_set():
        log.warning("stopped after %d of %d groups; the same command goes on from there", tally.done, tally.total)
    elif summary.overall.losses.rollouts == summary.overall.rollouts > 0:
        raise RunFailed(_all_lost(list(store.records())))
    elif tally.dropped:
        log.warning("%d groups lost rollouts; the same command tries them again", tally.dropped)
    return 0 if tally.done == tally.total else 1


def _all_lost(records: Sequence[RolloutRecord]) -> str:
    """Why nothing was scored, by what ended most of the rollouts."""
    (outcome, error), count = Counter(
        (record.outcome, record.error or "no reason given") for record in records
    ).most_common(1)[0]
    return f"all {len(records)} rollouts were lost to infrastructure, {count} of them so: {outcome}: {error}"


def finish(env: HermesAgentBaseEnv, store: RunStore, tally: Tally) -> Summary:
    """Export, sum up, and say where everything is."""
    examples = write_sft(store.records(), store.directory / "sft.jsonl", env.config.rewards.solved_at)
    summary = summarize(store.records())
    write_whole(store.directory / "summary.json", summary.to_json())
    log.info("%s; %d SFT examples; %s", tally.line(), examples, store.rollouts_path)
    return summary


def _directory(env: HermesAgentBaseEnv, suffix: str) -> Path:
    return env.config.run_dir or Path("runs") / f"{env.name}{suffix}"


def _store(env: HermesAgentBaseEnv, verb: str, directory: Path, fresh: bool) -> RunStore:
    """The run's folder. It is opened before slots and model: one that cannot be used must not cost their start."""
    Spending.prices(env)  # a budget without prices must not cost a start either
    return RunStore(directory, {"verb": verb, **identity(env)}, resume=not fresh)


def identity(env: HermesAgentBaseEnv) -> dict[str, Any]:
    """What makes two starts the same run: the settings, but not how fast or how far to go."""
    settings = {key: value for key, value in masked(env.config).items() if key not in IGNORED_ON_RESUME}
    servers: Sequence[Any] = env.server_configs
    kind = f"{type(env).__module__}:{type(env).__qualname__}"
    return {"environment": env.name, "class": kind, "env": settings, "openai": [masked(server) for server in servers]}
