"""Background processes of one rollout, by session id, and the notices of those that ended.

The ids mean nothing outside their table: one rollout can neither see nor stop what another started. A process's end is
waited for, never polled; its exit code is the one the slot server saw.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from agent_loop.tools.tool import ToolFailure
from sandbox_pool.errors import SandboxError

if TYPE_CHECKING:
    from sandbox_pool.client.process import Process
    from sandbox_pool.client.sandbox import Sandbox

log = logging.getLogger(__name__)

MAX_FINISHED = 64
"""Finished processes that stay visible."""


@dataclass
class Background:
    session_id: str
    command: str
    process: Process
    pty: bool
    cwd: str | None
    started: float = field(default_factory=time.monotonic)
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    ended: float | None = None
    exit_code: int | None = None
    log_end: int = 0
    """Bytes of output seen so far: the next look at its end starts near here."""

    @property
    def running(self) -> bool:
        """Whether its end has not been seen."""
        return self.exit_code is None

    def uptime_s(self) -> float:
        """Seconds from start to end, or to now."""
        return (self.ended or time.monotonic()) - self.started

    def set_exit(self, exit_code: int) -> None:
        """Remember the end; the first report counts."""
        if self.exit_code is None:
            self.exit_code, self.ended = exit_code, time.monotonic()


class ProcessTable:
    """Owns the background processes of a rollout and the tasks that wait for them."""

    def __init__(self, sandbox: Sandbox, max_running: int) -> None:
        self._sandbox = sandbox
        self._max_running = max_running
        self._entries: dict[str, Background] = {}
        self._watchers: set[asyncio.Task[None]] = set()
        self._notices: list[str] = []

    async def start(self, command: str, *, pty: bool, cwd: str | None, env: dict[str, str] | None = None) -> Background:
        """Start a command; raises ToolFailure when too many run already."""
        running = sum(entry.running for entry in self._entries.values())
        if running >= self._max_running:
            raise ToolFailure(
                f"{running} background processes are running: end some with process(action='kill') first."
            )
        process = await self._sandbox.spawn(command, pty=pty, cwd=cwd, env=env)
        entry = Background(f"proc_{secrets.token_hex(6)}", command, process, pty, cwd)
        self._entries[entry.session_id] = entry
        self._forget_old()
        return entry

    def get(self, session_id: str | None) -> Background:
        """The process with this id; raises ToolFailure when this rollout has none."""
        entry = self._entries.get(session_id or "")
        if entry is None:
            known = ", ".join(self._entries) or "none"
            raise ToolFailure(f"No process with ID {session_id!r}. Known: {known}.", status="not_found")
        return entry

    def all(self) -> list[Background]:
        """Every process, oldest first."""
        return list(self._entries.values())

    async def refresh(self, entry: Background) -> None:
        """Look whether it has ended."""
        if entry.running and (exit_code := await entry.process.poll()) is not None:
            entry.set_exit(exit_code)

    def notify_when_done(self, entry: Background, describe: Callable[[Background, str], str]) -> None:
        """Put a notice into the conversation when the process ends."""
        task = asyncio.create_task(self._watch(entry, describe), name=f"watch {entry.session_id}")
        self._watchers.add(task)
        task.add_done_callback(self._watchers.discard)

    async def _watch(self, entry: Background, describe: Callable[[Background, str], str]) -> None:
        try:
            if (exit_code := await entry.process.wait()) is not None:
                entry.set_exit(exit_code)
            chunk = await entry.process.log(offset=0)
            self._notices.append(describe(entry, chunk.data))
        except SandboxError as error:
            # The sandbox is gone: the next call on it says so to the loop, which is where it must be heard.
            log.debug("no notice for %s: %s", entry.session_id, error)

    def take_notices(self) -> list[str]:
        """Notices since the last time, each handed out once."""
        taken, self._notices = self._notices, []
        return taken

    async def close(self) -> None:
        """End the watchers. The processes end with the lease."""
        watchers = list(self._watchers)
        for task in watchers:
            task.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)

    def _forget_old(self) -> None:
        finished = [session_id for session_id, entry in self._entries.items() if not entry.running]
        for session_id in finished[: max(0, len(finished) - MAX_FINISHED)]:
            del self._entries[session_id]
