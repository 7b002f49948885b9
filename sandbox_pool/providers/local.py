"""Slot servers on this machine: the default provider, embedded, with nothing to install.

A host is a directory `<scratch>/hermes-rl-<uid>/<name>/` that says who owns it (`host.json`), holds the server's
scratch space and its log. The server dies with the process that started it; what a killed one left (mounts, cgroups,
processes, files) is removed by `stop`, which finds it by that directory alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import pwd
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sandbox_pool.errors import SandboxError, ScratchFull
from sandbox_pool.journal.owner import start_ticks
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext, start_error
from sandbox_pool.server.build.packing import pack
from sandbox_pool.server.cleanup import clean
from sandbox_pool.spec import SandboxSpec

SLOW = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "9p", "afs"})
"""File systems that are shared over a network, or too slow for layers that live for seconds."""
UNFIT = SLOW | {"overlay", "aufs", "fuse.fuse-overlayfs"}
"""Overlay on overlay does not work either: inside a container, /dev/shm is better."""


def candidates() -> list[Path]:
    """Where scratch space is looked for, best first."""
    return [Path("/scratch"), Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/dev/shm")]


def file_system_type(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that holds the path, as /proc/mounts names it."""
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    best, kind = "", ""
    real = str(path.resolve())
    for line in text.splitlines():
        fields = line.split(" ")
        point = fields[1].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def choose_scratch(configured: Path | None, places: Sequence[Path] | None = None) -> Path:
    """The configured place, made if need be; else the first writable local disk."""
    if configured is not None:
        path = configured.expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
        return path
    usable = [
        path
        for path in (candidates() if places is None else places)
        if path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    ]
    for path in usable:
        if file_system_type(path) not in UNFIT:
            return path
    if usable:
        return usable[0]
    raise ScratchFull("there is no writable scratch space on this machine: set `scratch_dir`")


def require_space(path: Path, min_mb: int) -> None:
    """Raise `ScratchFull` when less than `min_mb` is free."""
    free_mb = shutil.disk_usage(path).free // 2**20
    if free_mb < min_mb:
        raise ScratchFull(f"scratch space {path} is full: {free_mb} MB free, {min_mb} MB are kept; set `scratch_dir`")


TERM_GRACE_S = 5.0
SOCKET_PATH_LIMIT = 100
"""Linux allows 107 bytes for the path of a unix socket."""
LOG_TAIL = 2000
Records = list[HostRecord]


class LocalOptions(BaseModel):
    """`provider_options` of the local provider."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: str | None = None
    """Build slots at this isolation level instead of the strongest that works here."""
    user: str | None = None
    """Run slot servers as this user; only root can."""
    python: str = sys.executable
    """Interpreter of the slot server, 3.9 or later."""


class LocalProvider:
    """Starts slot servers as processes of this machine."""

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        self._context = context
        self._options = LocalOptions(**options)
        self._root = choose_scratch(context.scratch_dir) / f"hermes-rl-{os.getuid()}"
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    def host_key(self, spec: SandboxSpec) -> str:
        """A local server builds each slot for the spec of its lease, so every spec can use every host."""
        return "local"

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        """Start the server, or find the one of this name that is still running."""
        directory = self._directory(name)
        record = _read_record(directory)
        if record and _is_running(record):
            return Host(name, str(record["address"]), self._context.token(name), identity=str(record["pid"]))
        if directory.exists():
            await self.stop(name)
        self._root.mkdir(parents=True, exist_ok=True)
        require_space(self._root, self._context.scratch_min_mb)
        address = f"unix:{self._socket_path(name)}"
        await asyncio.to_thread(self._prepare, name, address)
        process = await self._launch(name, address)
        ready = await self._ready(name, process)
        address = str(ready.get("address", address))
        _write_record(directory, {**self._record(name, address), "pid": process.pid, "ticks": start_ticks(process.pid)})
        return Host(name, address, self._context.token(name), identity=str(process.pid))

    async def stop(self, name: str) -> None:
        """End the server and remove all it left. Raises when something remains."""
        directory = self._directory(name)
        await self._end_process(name, directory)
        if not directory.exists():
            return
        problems = await asyncio.to_thread(clean, str(directory / "scratch"))
        if problems:
            # The directory stays: it is how the next gc finds the rest.
            raise SandboxError(f"{name} left something behind: {'; '.join(problems)}")
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        self._socket_path(name).unlink(missing_ok=True)
        if directory.exists():
            raise SandboxError(f"{directory} could not be removed")
        with contextlib.suppress(OSError):
            self._root.rmdir()

    async def list(self) -> Records:
        """Every host directory below the scratch space, whoever started it."""
        return await asyncio.to_thread(self._list)

    def _list(self) -> Records:
        if not self._root.is_dir():
            return []
        found = []
        for directory in sorted(path for path in self._root.iterdir() if path.is_dir()):
            record = _read_record(directory) or {}
            state = "running" if _is_running(record) else ("dead" if "pid" in record else "starting")
            created_s = float(record.get("created_s", directory.stat().st_mtime))
            found.append(HostRecord(directory.name, str(record.get("owner", "")), state, created_s, str(directory)))
        return found

    def _directory(self, name: str) -> Path:
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"not a host name: {name!r}")
        return self._root / name

    def _socket_path(self, name: str) -> Path:
        path = self._directory(name) / "s"
        if len(str(path)) <= SOCKET_PATH_LIMIT:
            return path
        return Path("/tmp") / f"hrl-{hashlib.sha256(str(path).encode()).hexdigest()[:16]}.s"

    def _record(self, name: str, address: str) -> dict[str, Any]:
        return {"name": name, "owner": self._context.owner, "address": address, "created_s": time.time()}

    def _prepare(self, name: str, address: str) -> None:
        directory = self._directory(name)
        # Others may enter but not list it: slots of another uid keep their layers below.
        self._root.chmod(0o711)
        directory.mkdir(mode=0o711)
        _write_record(directory, self._record(name, address))
        scratch = directory / "scratch"
        scratch.mkdir(mode=0o711)
        (directory / "server.py").write_bytes(pack())
        if self._options.user is not None:
            entry = pwd.getpwnam(self._options.user)
            for path in (directory, scratch, directory / "server.py"):
                os.chown(path, entry.pw_uid, entry.pw_gid)

    async def _launch(self, name: str, address: str) -> asyncio.subprocess.Process:
        creating = asyncio.ensure_future(self._create_process(name, address))
        try:
            process = await asyncio.shield(creating)
        except asyncio.CancelledError:
            self._processes[name] = await creating  # so that the `stop` that follows finds it
            raise
        self._processes[name] = process
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it died at once: its log says why, and `_ready` reads it
            process.stdin.write(self._context.token(name).encode() + b"\n")
            await process.stdin.drain()
        return process

    async def _create_process(self, name: str, address: str) -> asyncio.subprocess.Process:
        directory = self._directory(name)
        arguments = [str(directory / "server.py"), "--scratch", str(directory / "scratch"), "--die-with-parent"]
        arguments += ["--listen", address, *self._context.server_arguments(name, self._options.level)]
        user = None if self._options.user is None else pwd.getpwnam(self._options.user)
        with (directory / "server.log").open("wb") as log_file:
            return await asyncio.create_subprocess_exec(
                self._options.python,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                env=_server_environment(),
                cwd="/",
                # Its own session: Ctrl-C in a terminal is for the client, which then ends its servers properly.
                start_new_session=True,
                # uvloop has no `user`, `group` and `extra_groups`
                preexec_fn=None if user is None else partial(_become, user.pw_uid, user.pw_gid),
            )

    async def _ready(self, name: str, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        try:
            ready = json.loads(line)
        except ValueError:
            ready = None
        if isinstance(ready, dict) and "error" not in ready:
            return ready
        message = str(ready["error"]) if isinstance(ready, dict) else ""
        log_text = (self._directory(name) / "server.log").read_text(errors="replace").strip()[-LOG_TAIL:]
        raise start_error(name, message or log_text or f"the server said {line!r}")

    async def _end_process(self, name: str, directory: Path) -> None:
        process = self._processes.pop(name, None)
        if process is not None:
            await _end_child(process)
            return
        record = _read_record(directory) or {}
        if _is_running(record):
            await _end_by_pid(int(record["pid"]), int(record["ticks"]))


def _become(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def _server_environment() -> dict[str, str]:
    """Nothing of the client's environment: it may hold secrets, and the server runs a model's commands."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}


def _read_record(directory: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((directory / "host.json").read_text())
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) else None


def _write_record(directory: Path, record: dict[str, Any]) -> None:
    draft = directory / ".host.json"
    draft.write_text(json.dumps(record))
    draft.replace(directory / "host.json")


def _is_running(record: Mapping[str, Any]) -> bool:
    return "pid" in record and start_ticks(int(record["pid"])) == record.get("ticks")


async def _end_child(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        # The end of its stdin tells the server to end; a signal could hit it while it is already cleaning up.
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), TERM_GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()
    transport = getattr(process, "_transport", None)
    if transport is not None:
        transport.close()


async def _end_by_pid(pid: int, ticks: int) -> None:
    """End a server that another process started: SIGTERM, then SIGKILL."""
    for number, grace_s in ((signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, TERM_GRACE_S)):
        if start_ticks(pid) != ticks:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        with contextlib.suppress(ProcessLookupError):
            await asyncio.to_thread(_await_exit, os.pidfd_open(pid), grace_s)


def _await_exit(pidfd: int, timeout_s: float) -> None:
    try:
        select.select([pidfd], [], [], timeout_s)
    finally:
        os.close(pidfd)
