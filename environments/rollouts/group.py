"""A group of rollouts of one item: as many trainable ones as asked for, or a group that is not complete.

A rollout that infrastructure ended is tried again, up to `tries` times and not after the deadline. What it left
behind is kept in `lost` and counted; it never becomes a score of 0. A failure of the reward code is kept there too, but
another rollout would not mend it. Members of a group do not touch each other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agent_loop.records.record import RolloutRecord
from environments.atropos.packing import ScoredRollout
from environments.rollouts.rollout import PREPARE_ERROR, REWARD_ERROR
from environments.sandboxes import Pool, Sandbox
from sandbox_pool.errors import SandboxError, SandboxFileError
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)


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


async def run_members(result: GroupResult, attempt: Attempt, tries: int, deadline_s: float) -> None:
    """Fill the result. Cancelling stops every member."""
    deadline = time.monotonic() + deadline_s

    async def member(number: int) -> ScoredRollout | None:
        for attempt_number in range(tries):
            rollout = await attempt(number, attempt_number)
            if rollout.record.trainable:
                return rollout
            result.lost.append(rollout.record)
            if rollout.record.outcome in (REWARD_ERROR, PREPARE_ERROR) or time.monotonic() >= deadline:
                break
        return None

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(member(number)) for number in range(result.wanted)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # members fail alike; one sentence is enough
    result.scored = [rollout for task in tasks if (rollout := task.result()) is not None]


async def prepared(
    pool: Pool, task_id: str, spec: SandboxSpec, prepare: Callable[[Sandbox], Awaitable[None]], tries: int
) -> str:
    """Prepare one slot and keep it as a snapshot for the rollouts of a group. Faults of slots are tried again."""
    for left in reversed(range(tries)):
        try:
            async with pool.lease(task_id, spec) as sandbox:
                await prepare(sandbox)
                return await sandbox.snapshot()
        except SandboxFileError:
            raise  # a file that prepare asked for: another slot would not have it either
        except SandboxError as error:
            if not left:
                raise
            log.warning("%s is tried again: %s", task_id, error)
    raise AssertionError("there is at least one try")


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

    def take(self) -> dict[str, float]:
        """The figures so far, and start again."""
        figures = {f"rollouts/{name}": total / self._counts[name] for name, total in sorted(self._sums.items())}
        figures |= {f"outcomes/{name}": float(count) for name, count in sorted(self._outcomes.items())}
        figures["outcomes/lost_to_infrastructure"] = float(self._lost)
        self.__init__()  # type: ignore[misc]
        return figures
