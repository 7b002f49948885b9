"""One machine and the ssh process that leads to it.

OpenSSH's own client connects: everything in ~/.ssh/config works (names, jump hosts, agents, hardware keys, known
hosts), and encryption takes no time of this process. Its only session runs the packed server with `--machine`
(`sandbox_pool/server/machine.py`); sockets are forwarded through it by its control socket. When this process dies, the
end of the session's stdin ends both.
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
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from sandbox_pool.errors import SandboxError
from sandbox_pool.providers.base import Texts
from sandbox_pool.providers.remote_start import packed_server
from sandbox_pool.server.machine import GREETING, SILENCE_S

BEGINS = "hermes-rl "
BOOTSTRAP = Path(__file__).with_name("ssh_bootstrap.py")
PING_S = SILENCE_S / 4
DOWN_S = (2.0, 10.0, 60.0)
"""How long a machine that could not be reached is left alone while others can be: after one failure, two, and more."""
LINE_LIMIT = 4 << 20
NOISE_LINES = 1000
LOG_TAIL = 500
END_S = 5.0
MASTER = (
    *("-oControlPersist=no", "-oExitOnForwardFailure=no", "-oStreamLocalBindUnlink=yes", "-oClearAllForwardings=yes"),
    *("-oForwardAgent=no", "-oForwardX11=no", "-oPermitLocalCommand=no", "-oRemoteCommand=none", "-oLogLevel=ERROR"),
)
"""Options of the process that connects: nothing of the user's config that would open more than this one session."""


class SshOptions(BaseModel):
    """`provider_options` of ssh."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    machines: Texts = Field(min_length=1)
    """What `ssh` is called with: names of ~/.ssh/config, `user@host`, or `ssh://user@host:port`."""
    config: Path | None = None
    """Another file than ~/.ssh/config."""
    identity_file: Path | None = None
    """A key to use besides those of the config and the agent."""
    check_host_keys: Literal["yes", "accept-new"] = "yes"
    """`yes` refuses a machine that known_hosts does not name; `accept-new` adds it on first sight. A changed key is
    always refused."""
    python: str = "python3"
    """Interpreter on the machines, 3.9 or later."""
    level: str | None = None
    """Build slots at this isolation level instead of the strongest that works there."""
    slots_per_core: float = Field(default=8.0, gt=0)
    """Slots that a machine carries for each of its cores, over all hosts on it."""
    memory_mb_per_slot: int = Field(default=256, ge=1)
    """Memory that a machine must have for each slot."""
    connect_timeout_s: float = Field(default=10.0, gt=0)
    ready_timeout_s: float = Field(default=60.0, gt=0)
    """How long login and the copy of the server may take, and how long an answer."""
    alive_s: float = Field(default=15.0, ge=3)
    """A machine that shows no sign of life for so long is lost, with all hosts on it."""

    @field_validator("machines")
    @classmethod
    def _names(cls, machines: tuple[str, ...]) -> tuple[str, ...]:
        for name in machines:
            if name.startswith("-") or not name.isprintable() or any(character.isspace() for character in name):
                raise ValueError(f"{name!r} is not the name of a machine")
        if len(set(machines)) != len(machines):
            raise ValueError("a machine is named twice")
        return machines


class MachineUnreachable(SandboxError):
    """The machine could not be asked."""


class MachineRefused(SandboxError):
    """The machine answered that it cannot, and why."""


class MachineFull(MachineRefused):
    """The machine has no room for one more host, and has made nothing."""


class Machine:
    """One machine and the ssh process that leads to it, started when something is asked and again after it ended."""

    def __init__(self, name: str, options: SshOptions, folder: SocketFolder) -> None:
        self.name = name
        self._options = options
        self._folder = folder
        self._connecting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._forwards: dict[str, tuple[Path, str]] = {}
        self._failures = 0
        self._retry_at_s = 0.0
        self.slots: dict[str, int] = {}
        """Slots of each host of this pool there."""
        self.capacity = 1

    @property
    def down(self) -> bool:
        """Whether it could not be reached a moment ago."""
        return time.monotonic() < self._retry_at_s

    async def ask(self, op: str, **fields: Any) -> Any:
        """The machine's answer; `MachineRefused` or `MachineUnreachable` when there is none."""
        process = await self.connect()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(process, {"id": number, "op": op, **fields})
            async with asyncio.timeout(self._options.ready_timeout_s):
                said = await answer
        except TimeoutError as error:
            raise MachineUnreachable(
                f"{self.name} has not answered {op} in {self._options.ready_timeout_s:g} s"
            ) from error
        finally:
            del self._waiting[number]
        if "error" in said:
            kind = MachineFull if said["kind"] in ("full", "scratch") else MachineRefused
            raise kind(f"{self.name}: {said['error']}")
        return said["ok"]

    async def forward(self, host: str, remote: str) -> Path:
        """A socket here that leads to a socket there."""
        if host not in self._forwards:
            local = self._folder.new_path()
            await self._control("forward", f"{local}:{remote}")
            self._forwards[host] = local, remote
        return self._forwards[host][0]

    async def drop_forward(self, host: str) -> None:
        """Close the socket of a host that was stopped."""
        if host in self._forwards:
            local, remote = self._forwards.pop(host)
            with contextlib.suppress(MachineUnreachable):  # closed with the connection
                await self._control("cancel", f"{local}:{remote}")
            local.unlink(missing_ok=True)

    async def close(self) -> None:
        """End the connection. What runs on the machine goes on."""
        async with self._connecting:
            await self._disconnect()

    async def connect(self) -> asyncio.subprocess.Process:
        """The ssh process that leads there, started unless it runs; `MachineUnreachable` when there is no way."""
        async with self._connecting:
            if self._process is None or self._process.returncode is not None:
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
        # One line without quotes inside: whatever shell the user has there.
        load = f'import base64,zlib;exec(zlib.decompress(base64.b64decode(b"{bootstrap}")))'
        # One that a killed ssh left would keep this one from taking requests.
        self._folder.file(self.name, "control").unlink(missing_ok=True)
        with self._folder.file(self.name, "log").open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *self._command("-T", "-M", *MASTER),
                *(f"-oServerAliveInterval={max(1, int(options.alive_s / 3))}", "-oServerAliveCountMax=3"),
                *("--", self.name, f"exec {options.python} -c '{load}' {program[1]}"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=LINE_LIMIT,
                # Its own session: Ctrl-C in a terminal is for the pool, which still needs the connection to clean up.
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(options.ready_timeout_s):
                facts = await self._load(process, program[0])
        except (TimeoutError, OSError) as error:
            await _end(process)
            reason = self._said() or str(error) or f"no login in {options.ready_timeout_s:g} s"
            raise MachineUnreachable(f"{self.name} cannot be used: {reason}") from error
        except BaseException:
            await _end(process)
            raise
        by_cores = facts["cores"] * options.slots_per_core
        by_memory = facts["memory_mb"] / options.memory_mb_per_slot if facts["memory_mb"] else by_cores
        self.capacity = max(1, int(min(by_cores, by_memory)))
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._read(process)), loop.create_task(self._ping(process))]
        return process

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
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(
                        MachineUnreachable(f"the connection to {self.name} ended: {self._said() or 'no reason given'}")
                    )
            # Ended here, so that sockets of hosts that nothing leads to any more are closed and the hosts are lost.
            await _end(process)
            for local, _ in self._forwards.values():
                local.unlink(missing_ok=True)
            self._forwards.clear()

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
            await _end(process)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()

    async def _control(self, command: str, forward: str) -> None:
        """Ask the running ssh process to open or close a forwarded socket."""
        process = await asyncio.create_subprocess_exec(
            *self._command("-O", command, "-L", forward, "--", self.name),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, errors = await process.communicate()
        if process.returncode:
            raise MachineUnreachable(f"{self.name}: no socket could be led there: {errors.decode().strip()}")

    def _command(self, *arguments: str) -> list[str]:
        options = self._options
        command = ["ssh", "-S", str(self._folder.file(self.name, "control")), "-oBatchMode=yes"]
        if options.config is not None:
            command += ["-F", str(options.config)]
        if options.identity_file is not None:
            command += ["-i", str(options.identity_file)]
        command.append(f"-oStrictHostKeyChecking={options.check_host_keys}")
        return [*command, f"-oConnectTimeout={max(1, round(options.connect_timeout_s))}", *arguments]

    def _said(self) -> str:
        """The end of what ssh and the machine wrote to stderr."""
        with contextlib.suppress(OSError):
            lines = self._folder.file(self.name, "log").read_text(errors="replace")[-LOG_TAIL:].split("\n")
            return "; ".join(line.strip() for line in lines if line.strip())
        return ""


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


class SocketFolder:
    """A folder with a short path for ssh's sockets, locked while in use: one that a killed pool left is removed."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._paths = itertools.count(1)
        prefix = f"hermes-rl-ssh-{os.getuid()}-"
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
