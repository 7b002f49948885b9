"""The serve loop: ask run-api how full it is, start groups, deliver what they give, end without losing any.

When to start, evaluate, checkpoint and stop are pure functions over run-api's status, each with its rule in words.

atroposlib's own loop cancels running rollouts when the queue is full, at every evaluation and at the end; this one
only ever stops starting new ones. A group in flight ends in one of four ways, and each is counted: delivered, dropped
by its environment, timed out (`worker_timeout`), or cancelled because a stop could not wait any longer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from environments.atropos.api import ApiLink, EnvStatus, StoppedWaiting
from environments.atropos.outbox import Outbox
from environments.atropos.stops import Stop
from environments.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from environments.atropos.atropos_env import AtroposEnvConfig

log = logging.getLogger(__name__)

SILENT_GROUPS = 8
"""So many groups in a row of which none could be sent are worth a warning; then twice as many, and so on."""
WHAT_TO_CHANGE = {
    "no_signal": "all rollouts of a group have the same score: raise env.group_size or env.agent_temperature, choose "
    "tasks that the model sometimes solves, or set env.ensure_scores_are_not_same to false",
    "too_long": "the trainer takes shorter sequences: lower env.max_token_length, or raise the trainer's max_token_len "
    "(run-api keeps that of the first /register until it is restarted or asked for /reset_data)",
    "incomplete": "rollouts were lost to infrastructure: the warnings above say how",
    "segments": "see env.segments",
}


class SilenceWatch:
    """Speaks up when group after group ends without anything for the trainer."""

    def __init__(self) -> None:
        self._sent = 0
        self._before: Counter[str] = Counter()
        self._groups = 0
        self._next = SILENT_GROUPS

    def group_ended(self, sent: int, rejected: Counter[str]) -> None:
        """Count a group, with how many were sent so far and how many were rejected, by reason."""
        if sent > self._sent:
            self._sent, self._before = sent, Counter(rejected)
            self._groups, self._next = 0, SILENT_GROUPS
            return
        self._groups += 1
        if self._groups < self._next:
            return
        self._next *= 2
        reasons = (rejected - self._before).most_common()
        counted = ", ".join(f"{count} {reason}" for reason, count in reasons) or "no reason given"
        hint = next((WHAT_TO_CHANGE[reason] for reason, _ in reasons if reason in WHAT_TO_CHANGE), "")
        log.warning(
            "NOTHING IS SENT TO THE TRAINER: none of the last %d groups could be used (%s)%s",
            self._groups,
            counted,
            f": {hint}" if hint else "",
        )


@dataclass(frozen=True)
class Pace:
    """The limits that decide how many groups may run."""

    group_size: int
    batch_size: int
    max_batches_offpolicy: int
    """Batches that may wait in the queue; 0 or less: no limit."""
    max_workers: int
    min_batch_allocation: float | None = None


def batch_share(pace: Pace, status: EnvStatus) -> int:
    """Sequences of one batch that this environment may fill: what no minimum claims, plus its own minimum."""
    return int(pace.batch_size * (status.unallocated_fraction + (pace.min_batch_allocation or 0.0)))


def groups_to_start(pace: Pace, status: EnvStatus, running: int, unsent: int, limit_ratio: float = 1.0) -> int:
    """How many more groups to start now.

    The queue, what runs and what waits to be sent together stay within `max_batches_offpolicy` batches. Two
    exceptions keep an environment alive next to a faster one that fills the shared queue: its guaranteed minimum is
    always filled, and with nothing of its own anywhere it may run one group.
    """
    workers = math.floor(pace.max_workers * limit_ratio)
    room = workers
    if pace.max_batches_offpolicy > 0:
        in_queue = pace.max_batches_offpolicy * batch_share(pace, status) // pace.group_size - status.queue_size
        room = max(in_queue, _own_minimum(pace, status)) - unsent
        if running + unsent + status.self_queue_size == 0:
            room = max(room, 1)
    return max(0, min(workers, room) - running)


def _own_minimum(pace: Pace, status: EnvStatus) -> int:
    """Groups missing from what `min_batch_allocation` promises the trainer over the allowed batches."""
    if pace.min_batch_allocation is None:
        return 0
    promised = pace.min_batch_allocation * pace.batch_size * pace.max_batches_offpolicy
    # run-api packs groups up to the largest group in the queue: fill whole packs, or the last one never leaves.
    pack = max(status.max_group_size, pace.group_size)
    groups = math.ceil(promised / pack) * pack // pace.group_size
    return max(0, groups - status.self_queue_size)


def crossed(before: int, now: int, every: int) -> bool:
    """Did the step counter pass a multiple of `every`? Steps jump by several, and `every` may be 1."""
    return every > 0 and now // every > before // every


def enough(pace: Pace, status: EnvStatus, running: int, unsent: int, total_steps: int) -> bool:
    """Will what exists already feed the trainer to its last step? Then nothing new is started."""
    if total_steps < 0 or pace.batch_size <= 0:
        return False
    waiting = (status.queue_size + running + unsent) * pace.group_size // pace.batch_size
    return status.current_step + waiting >= total_steps


def batch_problem(group_size: int, batch_size: int) -> str | None:
    """Why run-api would never form a batch of these groups, or None."""
    if batch_size <= 0:
        return "the trainer registered no batch size"
    if group_size > batch_size or batch_size % group_size:
        return f"groups of {group_size} never fill a batch of {batch_size}: it must be a multiple of the group size"
    return None


@dataclass(frozen=True)
class ServeHooks:
    """What the loop calls on the environment."""

    next_item: Callable[[], Awaitable[Any]]
    run_group: Callable[[Any], Coroutine[Any, Any, None]]
    """Roll out one item, check the group, hand it to the outbox."""
    evaluate: Callable[[], Awaitable[Any]]
    on_step: Callable[[int], Awaitable[None]]
    """The trainer has moved on: log metrics."""
    checkpoint: Callable[[int], None]
    pace: Callable[[], Awaitable[Pace]]
    """The trainer's sizes; asked again after run-api was replaced."""


@dataclass
class ServeCounts:
    """Groups by how they ended."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    timed_out: int = 0
    cancelled: int = 0
    evaluations: int = 0
    running: int = 0
    queue: int = 0
    """Groups that wait at run-api, when it was last asked."""
    rejected: Counter[str] = field(default_factory=Counter)


@dataclass
class _Worker:
    item: Any
    started_at: float


class ServeLoop:
    """One environment in serve mode."""

    def __init__(
        self,
        link: ApiLink,
        outbox: Outbox,
        config: AtroposEnvConfig,
        hooks: ServeHooks,
        stop: Stop,
        counts: ServeCounts | None = None,
    ) -> None:
        self.counts = ServeCounts() if counts is None else counts
        self.step = link.registration.starting_step
        self._link = link
        self._outbox = outbox
        self._pace: Pace | None = None
        self._epoch = 0
        self._config = config
        self._hooks = hooks
        self._stop = stop
        self._workers: dict[asyncio.Task[None], _Worker] = {}
        self._evaluation: asyncio.Task[Any] | None = None
        self._exhausted = False

    async def run(self) -> None:
        """Serve until the trainer is done, the items are used up, or a stop is asked for; then drain."""
        try:
            while True:
                # Counted before run-api is asked: a group that arrives there meanwhile counts twice for a moment.
                # Counted afterwards it would count nowhere, and one group too many would be started.
                running, unsent = len(self._workers), self._outbox.unsent
                if (status := await self._stop.unless_draining(self._link.status())) is None:
                    break
                self.counts.running, self.counts.queue = running, status.queue_size
                await self._advance(status)
                if self._is_over(status):
                    break
                await self._start_groups(status, await self._current_pace(), running, unsent)
                await self._wait()
            await self._drain()
        except StoppedWaiting as reason:
            log.warning("%s", reason)
        finally:
            await self._cancel_rest()

    async def _current_pace(self) -> Pace:
        if self._pace is None or self._epoch != self._link.epoch:
            self._epoch = self._link.epoch
            self._pace = await self._hooks.pace()
        return self._pace

    def _is_over(self, status: EnvStatus) -> bool:
        if 0 <= self._config.total_steps <= status.current_step:
            log.info("the trainer has made its %d steps", self._config.total_steps)
            return True
        if self._exhausted and not self._workers and not self._outbox.unsent:
            log.info("no items are left")
            return True
        return False

    async def _advance(self, status: EnvStatus) -> None:
        """Evaluate, checkpoint and log when the trainer's step counter has moved."""
        before, self.step = self.step, status.current_step
        if self.step == before:
            return
        if crossed(before, self.step, self._config.steps_per_eval):
            self._start_evaluation()
        if crossed(before, self.step, self._link.registration.checkpoint_interval):
            self._hooks.checkpoint(self.step)
        await self._hooks.on_step(self.step)

    def _start_evaluation(self) -> None:
        if self._evaluating:
            log.warning("step %d: the last evaluation still runs, this one is skipped", self.step)
            return
        self.counts.evaluations += 1
        self._evaluation = asyncio.create_task(_logged("evaluate", self._hooks.evaluate()), name="evaluate")

    @property
    def _evaluating(self) -> bool:
        return self._evaluation is not None and not self._evaluation.done()

    def _worker_ratio(self) -> float:
        """What an evaluation does to new training groups: nothing changes, none start, or fewer start."""
        handling = self._config.eval_handling.value
        if not self._evaluating or handling == "NONE":
            return 1.0
        return 0.0 if handling == "STOP_TRAIN" else float(self._config.eval_limit_ratio)

    async def _start_groups(self, status: EnvStatus, pace: Pace, running: int, unsent: int) -> None:
        if self._exhausted or enough(pace, status, running, unsent, self._config.total_steps):
            return
        for _ in range(groups_to_start(pace, status, running, unsent, self._worker_ratio())):
            item = await self._hooks.next_item()
            if item is None:
                self._exhausted = True
                return
            task = asyncio.create_task(self._hooks.run_group(item), name=f"group-{self.counts.started}")
            self._workers[task] = _Worker(item, time.monotonic())
            self.counts.started += 1

    async def _wait(self) -> None:
        """Until a group ends, a stop is asked for, or it is time to ask run-api again."""
        stopping = asyncio.create_task(self._stop.draining.wait())
        await asyncio.wait(
            {stopping, *self._workers}, timeout=self._config.status_poll_s, return_when="FIRST_COMPLETED"
        )
        stopping.cancel()
        self._reap()

    def _reap(self) -> None:
        limit = self._config.worker_timeout
        for task, worker in list(self._workers.items()):
            if task.done():
                del self._workers[task]
                self._count_end(task)
            elif 0 < limit < time.monotonic() - worker.started_at and not task.cancelling():
                log.warning("a group ran longer than worker_timeout %.0f s and is cancelled", limit)
                self.counts.timed_out += 1
                task.cancel()

    def _count_end(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, ConfigError | RunFailed):
            raise error
        if error is not None:
            self.counts.failed += 1
            log.error("a group failed: %r", error, exc_info=error)
        else:
            self.counts.finished += 1

    async def _drain(self) -> None:
        """Finish what runs and send it, within `drain_timeout_s` or until told to stop at once."""
        pending = {*self._workers, *([self._evaluation] if self._evaluating and self._evaluation else [])}
        if pending:
            log.info("finishing %d running groups (up to %.0f s)", len(self._workers), self._config.drain_timeout_s)
        deadline = time.monotonic() + self._config.drain_timeout_s
        at_once = asyncio.create_task(self._stop.now.wait())
        try:
            while pending and not at_once.done() and (left := deadline - time.monotonic()) > 0:
                _done, rest = await asyncio.wait({*pending, at_once}, timeout=left, return_when="FIRST_COMPLETED")
                pending = rest - {at_once}
            self._reap()
            await self._outbox.drain(max(1.0, deadline - time.monotonic()))
        finally:
            at_once.cancel()

    async def _cancel_rest(self) -> None:
        rest = [task for task in self._workers if not task.done()]
        self.counts.cancelled += len(rest)
        if self._evaluation is not None:
            rest.append(self._evaluation)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, *self._workers, return_exceptions=True)
        self._reap()


async def _logged(what: str, work: Awaitable[Any]) -> None:
    """Await; a fault of an evaluation is logged and does not end the training run."""
    try:
        await work
    except Exception as error:  # whatever a user's evaluation raises: it becomes a log line with its traceback
        log.error("%s failed: %r", what, error, exc_info=error)
