"""When to start, evaluate, checkpoint and stop: pure functions over the API's status, each with its rule in words.

Back-pressure here only ever stops *new* groups. What runs is finished and delivered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from environments.atropos.api import EnvStatus


@dataclass(frozen=True)
class Pace:
    """The limits that decide how many groups may run."""

    group_size: int
    batch_size: int
    max_batches_offpolicy: int
    """Batches that may wait in the queue; 0 or less is no limit."""
    max_workers: int
    min_batch_allocation: float | None = None


def batch_share(pace: Pace, status: EnvStatus) -> int:
    """Sequences of one batch that this environment may fill: what no minimum claims, plus its own minimum."""
    return int(pace.batch_size * (status.unallocated_fraction + (pace.min_batch_allocation or 0.0)))


def groups_to_start(pace: Pace, status: EnvStatus, running: int, unsent: int, limit_ratio: float = 1.0) -> int:
    """How many more groups to start now.

    The queue, what runs and what waits to be sent together stay within `max_batches_offpolicy` batches. Two
    exceptions keep an environment alive beside a faster one that fills the shared queue: its guaranteed minimum is
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
