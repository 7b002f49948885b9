"""A process that `learn` started: it keeps a log, dies with its parent, and is stopped in good order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from agent_loop import own_process

KILL_AFTER_S = 10.0
LAST_LINE_CHARS = 300
LINE_BYTES = 1 << 24

OnLine = Callable[[bytes], None]


class Child:
    """One process. Ctrl-C in a terminal reaches only its parent, which then stops its children one by one."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log: Path,
        on_line: OnLine | None = None,
        signals: Sequence[int] = (signal.SIGTERM,),
    ) -> None:
        """`on_line` gets each line of standard output; without it they go to the log too. `signals` end it."""
        self.name = name
        self._signals = tuple(signals)
        self._command = list(command)
        self._log = log
        self._on_line = on_line
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", str(Path(own_process.__file__)), str(os.getpid()), *self._command]
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE if self._on_line else log,
                stderr=log,
                start_new_session=True,
                limit=LINE_BYTES,
            )
        if self._on_line is not None:
            self._reading = asyncio.create_task(self._read(self._on_line))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def ended(self) -> int:
        """Wait until it has ended and all its lines are read; the exit code, negative for a signal."""
        assert self._process is not None
        if self._reading is not None:
            await asyncio.shield(self._reading)
        return await self._process.wait()

    async def stop(self) -> None:
        """Send its signals; SIGKILL if it does not end in time."""
        if self._process is None:
            return
        for number in self._signals:
            self._signal(number)
        try:
            await asyncio.wait_for(self.ended(), KILL_AFTER_S)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self.ended()

    def last_line(self) -> str:
        """The last line of its log."""
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return ""
        return lines[-1][-LAST_LINE_CHARS:] if lines else ""

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _read(self, on_line: OnLine) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            on_line(line)


def run_api_command(port: int) -> list[str]:
    """Starts the `run-api` that is installed with this interpreter."""
    return [str(Path(sys.executable).with_name("run-api")), "--host", "127.0.0.1", "--port", str(port)]
