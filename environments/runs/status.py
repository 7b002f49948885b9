"""What a run is doing, in files next to its rollouts: `view --live` and `top` read them while the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson

from environments.errors import UsageError, writing
from environments.runs.store import RunInUse, append_bytes, locked, write_whole

if TYPE_CHECKING:
    from sandbox_pool.pool.status import PoolStatus

log = logging.getLogger(__name__)

NAME = "status.json"
LEARN_NAME = "learn_status.json"
"""What `learn` itself does: the environment that it starts writes the other one in the same folder."""
FIGURES_NAME = "figures.jsonl"
"""What `serve` logs at each step of the trainer."""
EVERY_S = 2.0
USUAL = "rollouts"
"""Runs whose rollouts.jsonl has another name may share a folder: their files have that name in front."""


def beside(rollouts: Path, name: str) -> Path:
    """A file of the run that stores these rollouts."""
    return rollouts.with_name(name if rollouts.stem == USUAL else f"{rollouts.stem}.{name}")


@contextmanager
def sole_writer(rollouts: Path) -> Iterator[None]:
    """Hold a file of rollouts for this process; RunInUse when another one serves into it."""
    with writing(rollouts):
        rollouts.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = locked(rollouts.with_name(f".{rollouts.name}.lock"))
        except RunInUse:
            raise RunInUse(
                f"{rollouts} is being written by another serve: give each an env.data_path_to_save_groups of its own"
            ) from None
    try:
        yield
    finally:
        os.close(descriptor)


class StatusFile:
    """Writes `facts()` at once, every two seconds while it is entered, and once more at the end."""

    def __init__(self, rollouts: Path, verb: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._path = beside(rollouts, LEARN_NAME if verb == "learn" else NAME)
        self._verb, self._facts = verb, facts
        self._started_at = time.time()
        self._writer: asyncio.Task[None] | None = None
        self._over = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._keep(), name="status")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()  # not cancelled: a write that goes on in its thread would come after the last one
        if self._writer is not None:
            await self._writer
        await self._write(ended=True)

    async def _keep(self) -> None:
        while not self._over.is_set():
            await self._write(ended=False)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), EVERY_S)

    async def _write(self, *, ended: bool) -> None:
        said = {"verb": self._verb, "pid": os.getpid(), "started_at": self._started_at, "at": time.time()}
        data = orjson.dumps({**said, "ended": ended, "facts": dict(self._facts())}, default=str)
        try:
            await asyncio.to_thread(write_whole, self._path, data)
        except UsageError as error:  # a run does not end because nobody can watch it
            log.warning("%s", error)


def add_figures(rollouts: Path, step: int, figures: Mapping[str, Any]) -> None:
    """Add a line to the figures of a serving environment."""
    line = orjson.dumps({"step": step, "at": time.time(), "figures": dict(figures)}, default=str)
    try:
        append_bytes(beside(rollouts, FIGURES_NAME), line + b"\n")
    except UsageError as error:  # as above
        log.warning("%s", error)


def slot_facts(pool: Any) -> dict[str, Any]:
    """Slots by state, of a pool that can tell."""
    if not hasattr(pool, "status"):
        return {}
    status: PoolStatus = pool.status()
    return {
        "slots_leased": sum(len(host.leased) for host in status.hosts),
        "slots_free": sum(host.free for host in status.hosts),
        "slots_resetting": sum(host.resetting for host in status.hosts),
        "slots_quarantined": sum(len(host.quarantined) for host in status.hosts),
        "waiting_for_slots": status.waiting,
    }
