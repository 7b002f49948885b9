"""One machine and the process that leads to it.

The process runs the packed server with `--machine` there (`sandbox_pool/server/machine.py`), and lines of JSON pass
through its stdin and stdout. When this process dies, the end of that stdin ends it. How the machine is reached, and how
the sockets of its hosts are, is all that providers add.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sandbox_pool.errors import SandboxError
from sandbox_pool.providers.remote_start import packed_server
from sandbox_pool.server.machine import GREETING, SILENCE_S

BEGINS = "hermes-rl "
BOOTSTRAP = Path(__file__).with_name("machine_bootstrap.py")
PING_S = SILENCE_S / 4
DOWN_S = (2.0, 10.0, 60.0)
"""How long a machine that could not be reached is left alone while others can be: after one failure, two, and more."""
LINE_LIMIT = 4 << 20
NOISE_LINES = 1000
LOG_TAIL = 500


class MachineOptions(BaseModel):
    """`provider_options` of all providers whose hosts are on machines."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    python: str = "python3"
    """Interpreter on the machines, 3.9 or later."""
    level: str | None = None
    """Build slots at this isolation level instead of the strongest that works there."""
    slots_per_core: float = Field(default=8.0, gt=0)
    """Slots that a machine carries for each of its cores, over all hosts on it."""
    memory_mb_per_slot: int = Field(default=256, ge=1)
    """Memory that a machine must have for each slot."""
    ready_timeout_s: float = Field(default=60.0, gt=0)
    """How long login and the copy of the server may take, and how long an answer."""


class MachineUnreachable(SandboxError):
    """The machine could not be asked."""


class MachineRefused(SandboxError):
    """The machine answered that it cannot, and why."""


class MachineFull(MachineRefused):
    """The machine has no room for one more host, and has made nothing."""


class Machine:
    """One machine and the process that leads to it, started when something is asked and again after it ended."""

    keeps_servers = True
    """Whether servers outlive the process that leads there."""
    server_flags: tuple[str, ...] = ()
    """More arguments of servers there."""
    end_s = 5.0
    """How long that process may take to end when it is told so."""
    unreached = ""
    """What may be wrong when a server runs and nothing leads to it."""

    def __init__(self, name: str, options: MachineOptions, folder: SessionFolder) -> None:
        self.name = name
        self._options = options
        self._folder = folder
        self._connecting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._silent = False
        """That process will answer nothing more, though it may take a moment to end."""
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._failures = 0
        self._retry_at_s = 0.0
        self.slots: dict[str, int] = {}
        """Slots of each host of this pool there."""
        self.capacity = 1

    @property
    def down(self) -> bool:
        """Whether it could not be reached a moment ago."""
        return time.monotonic() < self._retry_at_s

    def command(self, python: list[str]) -> list[str]:
        """What runs this Python command on the machine, with its stdin and stdout."""
        raise NotImplementedError

    def listen(self) -> str | None:
        """Where servers there are to listen; None: at a socket in their folder."""
        return None

    async def reach(self, host: str, address: str) -> str:
        """The address here that leads to the address there."""
        return address

    async def unreach(self, host: str) -> None:
        """Give up what `reach` made for a host that was stopped."""

    def cut(self) -> None:
        """The process that led there has ended."""

    async def ask(self, op: str, *, within_s: float | None = None, **fields: Any) -> Any:
        """The machine's answer; `MachineRefused` or `MachineUnreachable` when there is none."""
        within_s = within_s or self._options.ready_timeout_s
        process = await self.connect()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(process, {"id": number, "op": op, **fields})
            async with asyncio.timeout(within_s):
                said = await answer
        except TimeoutError as error:
            raise MachineUnreachable(f"{self.name} has not answered {op} in {within_s:g} s") from error
        finally:
            del self._waiting[number]
        if "error" in said:
            kind = MachineFull if said["kind"] in ("full", "scratch") else MachineRefused
            raise kind(f"{self.name}: {said['error']}")
        return said["ok"]

    async def close(self) -> None:
        """End the connection. What runs on the machine goes on."""
        async with self._connecting:
            await self._disconnect()

    async def connect(self) -> asyncio.subprocess.Process:
        """The process that leads there, started unless it runs; `MachineUnreachable` when there is no way."""
        async with self._connecting:
            if self._process is None or self._process.returncode is not None or self._silent:
                await self._disconnect()
                try:
                    self._process = await self._connect()
                except MachineUnreachable:
                    self._retry_at_s = time.monotonic() + DOWN_S[min(self._failures, len(DOWN_S) - 1)]
                    self._failures += 1
                    raise
                self._failures, self._retry_at_s = 0, 0.0
            return self._process

    async def _connect(self) -> asyncio.subprocess.Process:
        options, program = self._options, (await asyncio.to_thread(packed_server))
        bootstrap = base64.b64encode(zlib.compress(BOOTSTRAP.read_bytes())).decode()
        # One line without single quotes inside: whatever shell the user has there.
        load = f'import base64,zlib;exec(zlib.decompress(base64.b64decode(b"{bootstrap}")))'
        mode = "--machine" if self.keeps_servers else "--machine-and-servers"
        process = await self._run(self.command([options.python, "-c", load, program[1], mode]))
        try:
            async with asyncio.timeout(options.ready_timeout_s):
                facts = await self._load(process, program[0])
        except (TimeoutError, OSError) as error:
            await self._end(process)
            reason = self._said() or str(error) or f"no login in {options.ready_timeout_s:g} s"
            raise MachineUnreachable(f"{self.name} cannot be used: {reason}") from error
        except BaseException:
            await self._end(process)
            raise
        self.capacity = self.room(facts)
        self._silent = False
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read(process)), loop.create_task(self._ping(process))]
        return process

    async def _run(self, command: list[str]) -> asyncio.subprocess.Process:
        try:
            with self._folder.file(self.name, "log").open("wb") as errors:
                return await asyncio.create_subprocess_exec(
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    limit=LINE_LIMIT,
                    # Its own session: Ctrl-C in a terminal is for the pool, which still needs it to clean up.
                    start_new_session=True,
                )
        except OSError as error:
            raise MachineUnreachable(f"{self.name} cannot be used: {error}") from error

    def room(self, facts: Mapping[str, Any]) -> int:
        """How many slots the machine carries."""
        by_cores = facts["cores"] * self._options.slots_per_core
        by_memory = facts["memory_mb"] / self._options.memory_mb_per_slot if facts["memory_mb"] else by_cores
        return max(1, int(min(by_cores, by_memory)))

    async def _load(self, process: asyncio.subprocess.Process, program: bytes) -> dict[str, Any]:
        """Send the server unless the machine has it; what the machine says about itself."""
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(NOISE_LINES):
            line = (await process.stdout.readline()).decode("utf-8", "replace")
            if line.startswith(GREETING):
                return dict(json.loads(line.removeprefix(GREETING)))
            if line == f"{BEGINS}need\n":
                process.stdin.write(b"%d\n" % len(program) + program)
                await process.stdin.drain()
            elif not line:
                raise ConnectionError(f"{self._options.python} did not run the slot server there")
        raise ConnectionError("its login prints without end")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        try:
            while line := await process.stdout.readline():
                said = json.loads(line)
                answer = self._waiting.get(said["id"])
                if answer is not None and not answer.done():
                    answer.set_result(said)
        finally:
            self._silent = True
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(
                        MachineUnreachable(f"the connection to {self.name} ended: {self._said() or 'no reason given'}")
                    )
            # Ended here, so that sockets of hosts that nothing leads to any more are closed and the hosts are lost.
            try:
                await self._end(process)
            finally:
                self.cut()

    async def _ping(self, process: asyncio.subprocess.Process) -> None:
        while True:
            await asyncio.sleep(PING_S)
            self._send(process, {"op": "ping"})

    @staticmethod
    def _send(process: asyncio.subprocess.Process, request: Mapping[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(request).encode() + b"\n")

    async def _disconnect(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await self._end(process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                async with asyncio.timeout(self.end_s):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()

    def _said(self) -> str:
        """The end of what the machine and the way to it wrote to stderr."""
        with contextlib.suppress(OSError):
            lines = self._folder.file(self.name, "log").read_text(errors="replace")[-LOG_TAIL:].split("\n")
            return "; ".join(line.strip() for line in lines if line.strip())
        return ""


class SessionFolder:
    """A folder with a short path for sockets and logs, locked while in use: one that a killed pool left is removed."""

    def __init__(self, kind: str) -> None:
        self._numbers: dict[str, int] = {}
        self._paths = itertools.count(1)
        prefix = f"hermes-rl-{kind}-{os.getuid()}-"
        place = Path(tempfile.gettempdir())
        if len(str(place)) > 40:
            place = Path("/tmp")
        for path in place.glob(f"{prefix}*"):
            _remove_unused(path)
        self.path, self._lock = _new_locked(prefix, place)

    def file(self, machine: str, kind: str) -> Path:
        """A machine's file of this kind; its name may be too long for a socket, so it has a number."""
        return self.path / f"{self._numbers.setdefault(machine, len(self._numbers))}.{kind}"

    def new_path(self) -> Path:
        """A path for one more socket."""
        return self.path / str(next(self._paths))

    def remove(self) -> None:
        """Remove it with all sockets."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _new_locked(prefix: str, place: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
        with contextlib.suppress(OSError):  # another process took it for one that is left, a moment before the lock
            folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(folder, fcntl.LOCK_EX)
            if path.exists():
                return path, folder
            os.close(folder)


def _remove_unused(path: Path) -> None:
    with contextlib.suppress(OSError):  # another user's, or removed meanwhile
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(folder)
