"""Background processes of one rollout, by session id, and the notices of those that ended.

The ids mean nothing outside their table: one rollout can neither see nor stop what another started. A process's end is
waited for, never polled; its exit code is the one the slot server saw.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from agent_loop.records.tape import random_name, seconds, utc_now
from agent_loop.tools.tool import ToolFailure
from sandbox_pool.errors import SandboxError

if TYPE_CHECKING:
    from sandbox_pool.client.process import Process
    from sandbox_pool.client.sandbox import Sandbox

log = logging.getLogger(__name__)

MAX_FINISHED = 64
"""Finished processes that stay visible."""
LOOK_S = 1.0
"""How often the output of a process with `watch_patterns` is looked at while it runs."""
MAX_MATCH_NOTICES = 10
"""Of one process; the last one says that it is the last."""
MAX_MATCHED_LINES = 20
_LONGEST_LINE = 10_000


@dataclass
class Background:
    session_id: str
    command: str
    process: Process
    pty: bool
    cwd: str | None
    started: float = field(default_factory=seconds)
    started_at: str = field(default_factory=utc_now)
    ended: float | None = None
    exit_code: int | None = None
    log_end: int = 0
    """Bytes of output seen so far: the next look at its end starts near here."""
    end_told: bool = False
    """Whether the model has read in a result that it ended: then no notice says it again."""

    @property
    def running(self) -> bool:
        """Whether its end has not been seen."""
        return self.exit_code is None

    def uptime_s(self) -> float:
        """Seconds from start to end, or to now."""
        return (self.ended or seconds()) - self.started

    def set_exit(self, exit_code: int) -> None:
        """Remember the end; the first report counts."""
        if self.exit_code is None:
            self.exit_code, self.ended = exit_code, seconds()


@dataclass(frozen=True)
class Watch:
    """What the model wants to be told about a process, and the sentences for it."""

    on_end: bool
    patterns: tuple[str, ...]
    """Plain texts, looked for in each line of output."""
    describe_end: Callable[[Background, str], str]
    describe_match: Callable[[Background, str, list[str]], str]


@dataclass(frozen=True)
class Notice:
    entry: Background
    text: str
    of_end: bool = False


class ProcessTable:
    """Owns the background processes of a rollout and the tasks that wait for them."""

    def __init__(self, sandbox: Sandbox, max_running: int) -> None:
        self._sandbox = sandbox
        self._max_running = max_running
        self._entries: dict[str, Background] = {}
        self._watchers: dict[asyncio.Task[None], Watch] = {}
        self._notices: list[Notice] = []
        self._news = asyncio.Event()

    async def start(self, command: str, *, pty: bool, cwd: str | None, env: dict[str, str] | None = None) -> Background:
        """Start a command; raises ToolFailure when too many run already."""
        running = await self._count_running()
        if running >= self._max_running:
            raise ToolFailure(
                f"{running} background processes are running: end some with process(action='kill') first."
            )
        process = await self._sandbox.spawn(command, pty=pty, cwd=cwd, env=env)
        entry = Background(f"proc_{random_name(6)}", command, process, pty, cwd)
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

    async def _count_running(self) -> int:
        """Processes that run. Those whose end nobody has looked at are asked before they keep another from starting."""
        running = [entry for entry in self._entries.values() if entry.running]
        if len(running) >= self._max_running:
            await asyncio.gather(*(self.refresh(entry) for entry in running))
        return sum(entry.running for entry in running)

    def watch(self, entry: Background, watch: Watch) -> None:
        """Put notices about the process into the conversation."""
        task = asyncio.create_task(self._watch(entry, watch), name=f"watch {entry.session_id}")
        self._watchers[task] = watch
        task.add_done_callback(self._watcher_ended)

    def _watcher_ended(self, task: asyncio.Task[None]) -> None:
        del self._watchers[task]
        self._news.set()

    async def _watch(self, entry: Background, watch: Watch) -> None:
        lines = _NewLines(entry)
        told = 0
        try:
            exit_code = None
            while exit_code is None:
                looking = bool(watch.patterns) and told < MAX_MATCH_NOTICES
                exit_code = await entry.process.wait(timeout_s=LOOK_S if looking else None)
                if looking and (found := _matches(await lines.read(ended=exit_code is not None), watch.patterns)):
                    told += 1
                    text = watch.describe_match(entry, *found)
                    last = f" (notice {told}, the last for this process)" if told == MAX_MATCH_NOTICES else ""
                    self._announce(Notice(entry, text + last))
            entry.set_exit(exit_code)
            if watch.on_end:
                chunk = await entry.process.log(offset=0)
                self._announce(Notice(entry, watch.describe_end(entry, chunk.data), of_end=True))
        except SandboxError as error:
            # The sandbox is gone: the next call on it says so to the loop, which is where it must be heard.
            log.debug("no notice for %s: %s", entry.session_id, error)

    def _announce(self, notice: Notice) -> None:
        self._notices.append(notice)
        self._news.set()

    def take_notices(self) -> list[str]:
        """Notices since the last time, each handed out once; an end that a result has told already is left out."""
        taken, self._notices = self._notices, []
        return [notice.text for notice in taken if not (notice.of_end and notice.entry.end_told)]

    async def wait_for_notice(self) -> bool:
        """Wait for the next notice while a process runs whose end is to be told; whether there is one.

        A pattern alone is not waited for: the line may never come.
        """
        while True:
            self._news.clear()
            self._notices = [notice for notice in self._notices if not (notice.of_end and notice.entry.end_told)]
            if self._notices:
                return True
            if not any(watch.on_end for watch in self._watchers.values()):
                return False
            await self._news.wait()

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


class _NewLines:
    """The whole lines that a process has written since the last look."""

    def __init__(self, entry: Background) -> None:
        self._entry = entry
        self._offset = 0
        self._rest = ""

    async def read(self, *, ended: bool) -> list[str]:
        """Lines since the last time; at the end of the process also the last one without a newline."""
        chunk = await self._entry.process.log(offset=self._offset)
        self._offset = chunk.next_offset
        *lines, self._rest = (self._rest + chunk.data).split("\n")
        self._rest = self._rest[-_LONGEST_LINE:]
        return [*lines, self._rest] if ended else lines


def _matches(lines: list[str], patterns: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """The first pattern that was found, and every line with one."""
    found = [(pattern, line) for line in lines for pattern in patterns if pattern in line]
    if not found:
        return None
    return found[0][0], list(dict.fromkeys(line for _, line in found))[:MAX_MATCHED_LINES]
