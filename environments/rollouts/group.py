"""A group of rollouts of one item: as many trainable ones as asked for, or a group that is not complete.

A rollout that infrastructure ended is tried again, up to `tries` times and not after the deadline. What it left
behind is kept in `lost` and counted; it never becomes a score of 0. Members of a group do not touch each other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from agent_loop.records.record import RolloutRecord
from environments.atropos.packing import ScoredRollout

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
            if time.monotonic() >= deadline:
                break
        return None

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(member(number)) for number in range(result.wanted)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # members fail alike; one sentence is enough
    result.scored = [rollout for task in tasks if (rollout := task.result()) is not None]
