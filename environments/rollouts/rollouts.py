"""`Rollouts`: the one place where rollouts are run, whoever asks for them: serve, process, evaluate, another trainer.

A group is as many trainable rollouts of one item as asked for, or it is not complete. A rollout that infrastructure
ended is tried again, up to `rollout_tries` times and not after the deadline. What it left behind is kept in `lost` and
counted; it never becomes a score of 0. A failure of the reward code is kept there too, but another rollout would not
mend it. Members of a group do not touch each other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from agent_loop.model.backends.backend import TokenBackend
from agent_loop.model.contract import ModelServer
from agent_loop.outcome import Outcome
from agent_loop.records.record import RolloutRecord
from environments.atropos.packing import ScoredRollout
from environments.errors import ConfigError, RolloutLost
from environments.rollouts.planning import RolloutJob, plan_group, prepared_key, seed_of
from environments.rollouts.rollout import PREPARE_ERROR, REWARD_ERROR, RewardFaults, RolloutRunner, hosts_asked
from environments.rollouts.samples import Sample, samples_of
from environments.sandboxes import Pool, Sandbox
from environments.scoring.contexts import SandboxContext, drop_if_there
from sandbox_pool.errors import SandboxError, SandboxFileError
from sandbox_pool.spec import NetworkRules, SandboxSpec

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv
    from environments.rollouts.hack_meter import Tripwire
    from sandbox_pool.pool.kept_snapshots import KeptSnapshots

log = logging.getLogger(__name__)


TRY_AGAIN_S = 0.5
"""Pause before the second try, doubled with each: a disk that is full for three seconds refuses at once, and without a
pause every item of these seconds would use up its tries."""
KEPT_SNAPSHOTS = 32
"""Prepared states that are kept for members of groups that are asked for one by one; nobody says when one is whole."""
KNOWN_GROUPS = 4096
"""Such groups whose members are still counted on, so that none of them get the same id."""

Mode = Literal["serve", "process", "evaluate"]
"""`serve`: ids of this process, and no seeds unless asked for. The others: ids and seeds that follow from `env.seed`,
so that a run can go on where it stopped."""

Attempt = Callable[[int, int], Awaitable[ScoredRollout]]
"""(member of the group, which try) -> a rollout, whose record says whether it may be trained on."""


@dataclass
class GroupResult:
    """What running one item gave."""

    group_id: str
    item_id: str
    wanted: int
    scored: list[ScoredRollout] = field(default_factory=list)
    lost: list[RolloutRecord] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every member of the group ended as a trainable rollout."""
        return len(self.scored) == self.wanted

    def records(self) -> Sequence[RolloutRecord]:
        """Every rollout, lost ones too."""
        return sorted((*(rollout.record for rollout in self.scored), *self.lost), key=lambda r: r.rollout_id)


async def run_members(
    result: GroupResult, attempt: Attempt, tries: int, deadline_s: float, members: Sequence[int]
) -> None:
    """Run members of a group at the same time and fill the result. Cancelling stops every member."""
    deadline = time.monotonic() + deadline_s

    async def member(number: int) -> ScoredRollout | None:
        for attempt_number in range(tries):
            rollout = await attempt(number, attempt_number)
            if rollout.record.trainable:
                return rollout
            result.lost.append(rollout.record)
            if rollout.record.outcome in (REWARD_ERROR, PREPARE_ERROR) or time.monotonic() >= deadline:
                break
            if attempt_number + 1 < tries:
                await asyncio.sleep(TRY_AGAIN_S * 2**attempt_number)
        return None

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(member(number)) for number in members]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # members fail alike; one sentence is enough
    result.scored = [rollout for task in tasks if (rollout := task.result()) is not None]


@dataclass(frozen=True)
class Prepared:
    """What the rollouts of a group start from."""

    snapshot: str
    network: Sequence[dict[str, Any]] = ()
    """Hosts asked for while it was made; none when it was made earlier."""


@dataclass
class Start:
    """What the rollouts of a group start from, and how it is made anew where it went with its host."""

    pool: Pool
    made: Prepared
    make: Callable[[], Awaitable[Prepared]]
    _looking: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    async def renew(self) -> None:
        """Prepare again what is no longer there; once, however many rollouts find that out."""
        async with self._looking:
            if not await self.pool.has_snapshot(self.made.snapshot):
                gone, self.made = self.made, await self.make()
                await drop_if_there(self.pool, gone.snapshot)

    async def drop(self) -> None:
        """Free it."""
        await drop_if_there(self.pool, self.made.snapshot)


def from_prepared(job: RolloutJob, start: Start | None) -> RolloutJob:
    """The job as one that starts from what was prepared, if something was."""
    return job if start is None else replace(job, snapshot=start.made.snapshot, prepared_network=start.made.network)


async def prepared_once(
    pool: Pool, kept: KeptSnapshots, key: str, spec: SandboxSpec, prepare: Callable[[], Awaitable[Prepared]]
) -> Prepared:
    """What an earlier group, run or process prepared under the same key; else prepare it, and keep it."""
    file = await asyncio.to_thread(kept.open, key)
    if file is not None:
        return Prepared(pool.add_snapshot(file, spec))
    made = await prepare()
    try:
        await kept.keep(key, pool.export_snapshot(made.snapshot))
    except (OSError, SandboxError) as error:
        log.warning("what was prepared is not kept for later: %s", error)
    return made


async def prepared(
    pool: Pool, task_id: str, spec: SandboxSpec, prepare: Callable[[Sandbox], Awaitable[None]], tries: int
) -> Prepared:
    """Prepare one slot and keep it as a snapshot for the rollouts of a group. Faults of slots are tried again."""
    hosts = spec.network.prepare_entries() if isinstance(spec.network, NetworkRules) else None
    for left in reversed(range(tries)):
        try:
            async with pool.lease(task_id, spec) as sandbox:
                if hosts is not None:
                    await sandbox.allow_hosts(hosts)
                await prepare(sandbox)
                asked = await hosts_asked(sandbox, "prepare")
                return Prepared(await sandbox.snapshot(), asked)
        except SandboxFileError:
            raise  # a file that prepare asked for: another slot would not have it either
        except SandboxError as error:
            if not left:
                raise
            log.warning("%s is tried again: %s", task_id, error)
    raise AssertionError("there is at least one try")


@dataclass
class _Group:
    """A group whose members are asked for one by one."""

    item_id: str
    members: int = 0
    users: int = 0
    prepared: bool = False
    start: Start | None = None
    preparing: asyncio.Lock = field(default_factory=asyncio.Lock)


class Rollouts:
    """Runs rollouts of one environment.

        async with Rollouts("terminal_tasks", model=backend) as rollouts:
            async for item in rollouts.items():
                samples = await rollouts.group(item, 8)

    `group` is for trainers that ask by group, `member` for those that ask one by one; any number of calls may run at
    once. Both give `Sample`s, and raise `RolloutLost` where infrastructure left less than was asked for: a smaller
    group is never passed off as a whole one, and a loss never as a score.
    """

    def __init__(
        self,
        source: HermesAgentBaseEnv | str | Path,
        settings: Sequence[str] = (),
        *,
        model: ModelServer | TokenBackend | None = None,
        tokenizer: Any = None,
        pool: Pool | None = None,
        mode: Mode = "serve",
    ) -> None:
        """`source` is an environment, or a config by file or name with `settings` as on the command line.

        `model` samples instead of the configured server: a `TokenBackend` (ids in, ids and logprobs out; closed with
        this object) needs the `tokenizer` of its model, unless env.tokenizer_name names it.
        """
        if isinstance(source, str | Path):
            from environments.launch import load_environment

            source = load_environment(source, settings)
        self.env = source
        self.env.rollouts = self
        self.env.model = model or source.model
        self.env.backend_tokenizer = tokenizer
        self.env.pool = pool or source.pool
        self.mode: Mode = mode
        self.run_tag = uuid.uuid4().hex[:8]
        self._numbers = itertools.count()
        self._one_by_one: OrderedDict[str, _Group] = OrderedDict()
        self._reward_faults = RewardFaults()
        self._failed_items = 0
        self._failed: list[tuple[str, str]] = []
        self._sampled = False

    async def __aenter__(self) -> Rollouts:
        """Open pool and model, and load the items."""
        try:
            await self.env.open_up()
            await self.env.setup()
        except BaseException:
            await self.env.shut_down()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for group in self._one_by_one.values():
                await self._drop(group)
        finally:
            await self.env.shut_down()

    async def items(self) -> AsyncIterator[Any]:
        """The environment's items, as long as there are any."""
        while (item := await self.env.next_item()) is not None:
            yield item

    async def group(self, item: Any, n: int | None = None, *, temperature: float | None = None) -> list[Sample]:
        """`n` rollouts of one item (default env.group_size) with their advantages in the group."""
        wanted = self.env.config.group_size if n is None else n
        if wanted < 1:
            raise ValueError(f"a group has at least one rollout, not {wanted}")
        result = await self.run_group(item, self.next_index(), wanted, temperature)
        await self.env.save(result)
        if not result.complete:
            raise RolloutLost(f"{len(result.scored)} of {wanted} rollouts of {result.item_id}", result.lost)
        return samples_of(result.scored, self.env.config.segments, self.env.config.advantages)

    async def member(self, item: Any, group: str, *, temperature: float | None = None) -> list[Sample]:
        """One more rollout of the group of this name; its advantage is for whoever has the whole group.

        The members of a group share what `prepare` made: it runs once, however many calls there are.
        """
        rollout = await self.run_member(item, group, temperature)
        return samples_of([rollout], self.env.config.segments, None)

    async def run_member(
        self, item: Any, group: str, temperature: float | None = None, model: ModelServer | None = None
    ) -> ScoredRollout:
        """As `member`, with the whole rollout; `model` samples this one instead of what is open."""
        async with self.place(item, group, temperature) as (job, number, start):
            result = GroupResult(job.group_id, job.item_id, 1)
            await self._run(result, job, f"train-{group}-{job.item_id}", [number], model=model, start=start)
            await self.env.save(result)
        if not result.complete:
            raise RolloutLost(f"a rollout of {result.item_id}", result.lost)
        return result.scored[0]

    def next_index(self) -> int:
        """The number of the next group."""
        return next(self._numbers)

    def number_from(self, first: int, step: int) -> None:
        """Number the next groups `first`, `first + step` and so on, so that several processes draw different ones."""
        self._numbers = itertools.count(first, step)

    async def run_group(
        self,
        item: Any,
        index: int,
        wanted: int,
        temperature: float | None = None,
        tag: str | None = None,
        wire: Tripwire | None = None,
    ) -> GroupResult:
        """Roll out one item `wanted` times; untrainable rollouts are tried again within the limits.

        A `tag` sets the group apart from training: it names its ids, and its rollouts stay out of the step's figures.
        """
        env = self.env
        env.check_open()
        result = GroupResult(f"{env.name}-{tag or self._series}-{index:06d}", env.item_id(item), wanted)
        try:
            start = await self._prepare(item, result.group_id)
        except Exception as error:  # whatever prepare raises: this item is lost, and the run goes on
            log.exception("item %s could not be prepared", result.item_id)
            self._lose_item(item, result, f"{type(error).__name__}: {error}")
            return result
        try:
            job = from_prepared(plan_group(env, item, result.group_id, index, temperature), start)
            job = replace(job, wire=wire)
            await self._run(
                result, job, f"{tag or 'train'}-{index}-{result.item_id}", range(wanted), tag is None, start=start
            )
        finally:
            if start is not None:
                await start.drop()
        return result

    @property
    def _series(self) -> str:
        return self.run_tag if self.mode == "serve" else str(self.env.config.seed)

    async def _run(
        self,
        result: GroupResult,
        job: RolloutJob,
        seeds: str,
        members: Sequence[int],
        counted: bool = True,
        model: ModelServer | None = None,
        start: Start | None = None,
    ) -> None:
        runner = self.runner(model)

        async def attempt(member: int, attempt_number: int) -> ScoredRollout:
            rollout_id = f"{result.group_id}/{member}" + (f".{attempt_number}" if attempt_number else "")
            sampling = replace(job.sampling, seed=self._seed(seeds, member, attempt_number))
            told = (await self._again(job, start) if attempt_number else job).for_rollout(rollout_id, sampling)
            if self.env.cassettes is None:
                rollout = await runner.run(told)
            else:
                rollout = await self.env.cassettes.recorded(told, runner.run)
            self._check_prompt_fits(rollout.record)
            if counted:
                self.env.keep(rollout.record)
            return rollout

        await run_members(result, attempt, self.env.config.rollout_tries, self.env.config.group_deadline_s, members)
        if failed := [record for record in result.lost if record.outcome == PREPARE_ERROR]:
            self.count_failed(result.item_id, str(failed[0].error))

    async def _again(self, job: RolloutJob, start: Start | None) -> RolloutJob:
        """The job for a rollout that is tried again."""
        try:
            if start is not None:
                await start.renew()
        except Exception:  # whatever prepare raises: this try is lost like the one before
            log.exception("item %s could not be prepared again", job.item_id)
        return from_prepared(job, start)

    def runner(self, model: ModelServer | None = None) -> RolloutRunner:
        """Runs single rollouts, of this model or of the one that is open."""
        from environments.base import HermesAgentBaseEnv

        env = self.env
        starts = type(env).start is not HermesAgentBaseEnv.start
        pool = env.opened_pool()
        return RolloutRunner(
            pool if env.cassettes is None else env.cassettes.taped(pool),
            model or env.opened_model(),
            env.reward_terms,
            env.compute_reward,
            self._reward_faults,
            env.start if starts else None,
            env.keep_workspace,
        )

    @asynccontextmanager
    async def place(
        self, item: Any, group: str, temperature: float | None = None
    ) -> AsyncIterator[tuple[RolloutJob, int, Start | None]]:
        """What the next member of a group is told, its number there, and what it starts from, kept until the end."""
        env = self.env
        env.check_open()
        group_id = f"{env.name}-{self._series}-{group}"
        known = self._one_by_one.setdefault(group, _Group(env.item_id(item)))
        if known.item_id != env.item_id(item):
            raise ValueError(f"group {group!r} is of item {known.item_id}, not of {env.item_id(item)}")
        self._one_by_one.move_to_end(group)
        number, known.members = known.members, known.members + 1
        known.users += 1
        try:
            async with known.preparing:
                if not known.prepared or known.start is not None:
                    known.start = await self._prepare_or_lose(item, group_id, known.start)
                    known.prepared = True
            index = seed_of(env.config, group)  # draws of tools follow from the name of the group
            job = from_prepared(plan_group(env, item, group_id, index, temperature), known.start)
            yield job, number, known.start
        finally:
            known.users -= 1
            await self._drop_idle()

    async def _prepare_or_lose(self, item: Any, group_id: str, start: Start | None) -> Start | None:
        try:
            if start is None:
                return await self._prepare(item, group_id)
            await start.renew()
            return start
        except Exception as error:
            log.exception("item %s could not be prepared", self.env.item_id(item))
            result = GroupResult(group_id, self.env.item_id(item), 1)
            self._lose_item(item, result, f"{type(error).__name__}: {error}")
            raise RolloutLost(f"item {result.item_id}", result.lost) from error

    async def _drop_idle(self) -> None:
        """Free prepared states of groups that were not asked for lately, and forget the oldest groups."""
        kept = [group for group in self._one_by_one.values() if group.start is not None]
        for group in kept[: max(0, len(kept) - KEPT_SNAPSHOTS)]:
            if not group.users:
                await self._drop(group)
        for name, group in list(self._one_by_one.items())[: max(0, len(self._one_by_one) - KNOWN_GROUPS)]:
            if not group.users and group.start is None:
                del self._one_by_one[name]

    async def _drop(self, group: _Group) -> None:
        start, group.start, group.prepared = group.start, None, False
        if start is not None:
            await start.drop()

    async def _prepare(self, item: Any, group_id: str) -> Start | None:
        """The prepared state that the rollouts of a group start from; None when there is nothing to prepare."""
        from environments.base import HermesAgentBaseEnv

        env = self.env
        if type(env).prepare is HermesAgentBaseEnv.prepare and not env.files(item):
            return None

        async def prepare(sandbox: Sandbox) -> None:
            ctx = SandboxContext(sandbox)
            for path, data in env.files(item).items():
                await ctx.write_file(path, data)
            await env.prepare(item, ctx)

        pool, spec, name = env.opened_pool(), env.spec(item), f"{group_id}/prepare"

        async def make() -> Prepared:
            return await prepared(pool, name, spec, prepare, env.config.rollout_tries)

        if not env.config.prepare_cache_mb:
            return Start(pool, await make(), make)
        from sandbox_pool.pool.kept_snapshots import KeptSnapshots

        kept = KeptSnapshots(env.config.pool.resolved_state_dir(), env.config.prepare_cache_mb)
        key = prepared_key(env, item, spec)
        return Start(pool, await prepared_once(pool, kept, key, spec, make), make)

    def _lose_item(self, item: Any, result: GroupResult, why: str) -> None:
        env = self.env
        result.lost.append(
            RolloutRecord(
                rollout_id=f"{result.group_id}/prepare",
                group_id=result.group_id,
                environment=env.name or type(env).__name__,
                item_id=result.item_id,
                category=env.category(item),
                policy=env.policy_name,
                outcome=PREPARE_ERROR,
                error=why,
                trainable=False,
                messages=[],
            )
        )
        self.count_failed(result.item_id, why)

    def take_failed(self) -> list[tuple[str, str]]:
        """Items that could not be prepared since the last call, and why."""
        failed, self._failed = self._failed, []
        return failed

    def count_failed(self, item_id: str, why: str) -> None:
        """An item could not be prepared; ConfigError when that happened too often."""
        self._failed_items += 1
        self._failed.append((item_id, why))
        most = self.env.config.max_failed_items
        if most is not None and self._failed_items > most:
            raise ConfigError(
                f"{self._failed_items} items could not be prepared, more than env.max_failed_items ({most}); the last "
                f"one is {item_id}: {why}"
            )

    def _seed(self, group: str, member: int, attempt_number: int) -> int | None:
        """Members of a group have seeds that follow each other, so that a server may sample them as one request."""
        wanted = self.env.config.seeded_sampling
        if not (self.mode != "serve" if wanted is None else wanted):
            return None
        anew = f"@{self.env.config.sampling_seed}" if self.env.config.sampling_seed else ""
        return seed_of(self.env.config, f"{group}.{attempt_number}{anew}") + member

    def _check_prompt_fits(self, record: RolloutRecord) -> None:
        """A prompt without room for its first turn is a mistake of the settings as long as no rollout had room."""
        self._sampled = self._sampled or bool(record.turns)
        if record.outcome == Outcome.CONTEXT_OVERFLOW.value and not self._sampled:
            raise ConfigError(
                f"item {record.item_id}: the first prompt does not fit: {record.error}: raise env.max_token_length "
                f"(now {self.env.longest_sequence()}), or enable fewer tools (env.enabled_toolsets)"
            )


class RolloutStats:
    """Figures of the rollouts between two log lines: means by name, counts by outcome."""

    def __init__(self) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._counts: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._lost = 0

    def add(self, record: RolloutRecord) -> None:
        """Count one rollout; only trainable ones enter the means."""
        self._outcomes[record.outcome] += 1
        if not record.trainable:
            self._lost += record.outcome not in (REWARD_ERROR, PREPARE_ERROR)
            return
        values = {f"metrics/{name}": value for name, value in record.metrics.items()}
        values |= {f"reward/{name}": value for name, value in record.reward_components.items()}
        values |= {f"timing/{name}": value for name, value in record.timing.items()}
        if record.score is not None:
            values["score"] = record.score
        if record.verifier_score is not None:
            values["verifier_score"] = record.verifier_score
        values["segments"] = float(len(record.segments))
        for name, value in values.items():
            self._sums[name] += value
            self._counts[name] += 1

    def merge(self, other: RolloutStats) -> None:
        """Add the figures of another process."""
        for name, total in other._sums.items():
            self._sums[name] += total
        self._counts += other._counts
        self._outcomes += other._outcomes
        self._lost += other._lost

    def take(self) -> dict[str, float]:
        """The figures so far, and start again."""
        figures = {f"rollouts/{name}": total / self._counts[name] for name, total in sorted(self._sums.items())}
        figures |= {f"outcomes/{name}": float(count) for name, count in sorted(self._outcomes.items())}
        figures["outcomes/lost_to_infrastructure"] = float(self._lost)
        self.__init__()  # type: ignore[misc]
        return figures
