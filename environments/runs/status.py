"""What a run is doing, in a file next to its rollouts: `view --live` and `top` read it while the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import orjson

from environments.errors import UsageError
from environments.runs.store import write_whole

if TYPE_CHECKING:
    from sandbox_pool.pool.status import PoolStatus

log = logging.getLogger(__name__)

NAME = "status.json"
EVERY_S = 2.0


class StatusFile:
    """Writes `facts()` every two seconds while it is entered, and once more at the end."""

    def __init__(self, folder: Path, verb: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        self._path = folder / NAME
        self._verb, self._facts = verb, facts
        self._started_at = time.time()
        self._writer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._writer = asyncio.create_task(self._keep(), name="status")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._writer
        await self._write(ended=True)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self._write(ended=False)

    async def _write(self, *, ended: bool) -> None:
        said = {"verb": self._verb, "pid": os.getpid(), "started_at": self._started_at, "at": time.time()}
        data = orjson.dumps({**said, "ended": ended, "facts": dict(self._facts())}, default=str)
        try:
            await asyncio.to_thread(write_whole, self._path, data)
        except UsageError as error:  # a run does not end because nobody can watch it
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
