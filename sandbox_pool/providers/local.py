"""Slot servers on this machine: the default provider, embedded, with nothing to install.

A host is a directory `<scratch>/hermes-rl-<uid>/<name>/` that says who owns it (`host.json`), holds the server's
scratch space and its log. No other user can write there, and a process is ended only when it is proven to be the
recorded one. The server dies with the process that started it; what a killed one left (mounts, cgroups, processes,
files) is removed by `stop`, which finds it by that directory alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import os
import pwd
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sandbox_pool.errors import SandboxError, ScratchFull, StateError
from sandbox_pool.journal.owner import start_ticks
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext, checked_options, start_error
from sandbox_pool.server.build.packing import pack
from sandbox_pool.server.cleanup import clean
from sandbox_pool.server.host_files import FOLDER, NotPrivate, check_private, open_private, remove_tree
from sandbox_pool.server.host_folders import (
    ALIVE,
    INSTANCE,
    OWN_MODE,
    SOCKET_PATH_LIMIT,
    UNFIT,
    candidates,
    file_system_type,
    is_folder,
    is_running,
    own_name,
    read_record,
    write_new,
    write_record,
)
from sandbox_pool.spec import SandboxSpec


def choose_scratch(configured: Path | None, places: Sequence[Path] | None = None) -> Path:
    """This user's own folder in the configured place; else in the first local disk where one can be had."""
    if configured is not None:
        return own_folder(configured.expanduser().absolute())
    usable = [
        path
        for path in (candidates() if places is None else places)
        if path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    ]
    refusals = []
    for path in sorted(usable, key=lambda path: file_system_type(path) in UNFIT):
        try:
            return own_folder(path)
        except StateError as error:
            refusals.append(str(error))
    why = f" ({'; '.join(refusals)})" if refusals else ""
    raise ScratchFull(f"there is no scratch space on this machine that can be used{why}: set `scratch_dir`")


def sockets_name() -> str:
    """Name of this user's folder for sockets whose path would be too long in their scratch space."""
    return f"hermes-rl-sockets-{os.getuid()}"


def own_folder(place: Path) -> Path:
    """Where this user's folder in a scratch space is or will be; `StateError` when others could change it."""
    path = place / own_name()
    with scratch_errors(place):
        place.mkdir(parents=True, exist_ok=True)
        check_private(path)
        if not os.access(path if path.exists() else place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "it cannot be written", str(place))
    return path


@contextlib.contextmanager
def scratch_errors(place: Path) -> Iterator[None]:
    """Turn a scratch space that cannot be used into one sentence."""
    try:
        yield
    except NotPrivate as error:
        raise StateError(f"the scratch space cannot be used: {error}; set another `scratch_dir`") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise StateError(f"the scratch space {place} cannot be used: {reason}; set another `scratch_dir`") from error


def require_space(path: Path, min_mb: int) -> None:
    """Raise `ScratchFull` when less than `min_mb` is free."""
    free_mb = shutil.disk_usage(path).free // 2**20
    if free_mb < min_mb:
        raise ScratchFull(f"scratch space {path} is full: {free_mb} MB free, {min_mb} MB are kept; set `scratch_dir`")


TERM_GRACE_S = 5.0
BEING_MADE_S = 10.0
"""A folder without a record that is younger may be one that somebody is about to write."""
ROOT_TRIES = 20
SHORT_PLACES = (Path("/tmp"), Path("/dev/shm"), Path("/var/tmp"))
"""Where sockets go whose path would be too long."""
INTERPRETER_NEEDS = ("LD_LIBRARY_PATH", "PYTHONHOME")
"""What a Python of an HPC module may not start without."""
LOG_TAIL = 2000
Records = list[HostRecord]
Roots = list[Path]
Problems = list[str]


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
        self._options = checked_options(LocalOptions, options)
        self._root = choose_scratch(context.scratch_dir)
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    def host_key(self, spec: SandboxSpec) -> str:
        """A local server builds each slot for the spec of its lease, so every spec can use every host."""
        return "local"

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        """Start the server, or find the one of this name that is still running."""
        directory = await asyncio.to_thread(self._directory, name)
        record = read_record(directory)
        if record and is_running(directory, record):
            return Host(name, str(record["address"]), self._context.token(name), identity=str(record["pid"]))
        if directory.exists():
            await self.stop(name)
            directory = self._root / name
        with scratch_errors(self._root.parent):
            address = await asyncio.to_thread(self._prepare, directory)
        process = await self._launch(directory, address)
        ready = await self._ready(directory, process)
        address = str(ready.get("address", address))
        identity = {"pid": process.pid, "ticks": start_ticks(process.pid)}
        write_record(directory, {**self._record(name, address), **identity})
        return Host(name, address, self._context.token(name), identity=str(process.pid))

    async def stop(self, name: str) -> None:
        """End the server and remove all it left. Raises when something remains."""
        directory = await asyncio.to_thread(self._directory, name)
        record = read_record(directory) or {}
        await self._end_process(directory, record)
        if not directory.exists():
            return
        problems = await asyncio.to_thread(self._clean, directory)
        if problems:
            # The directory stays: it is how the next gc finds the rest.
            raise SandboxError(f"{name} left something behind: {'; '.join(problems)}")
        problems = await asyncio.to_thread(_remove, directory, str(record.get("address", "")))
        if problems:
            raise SandboxError(f"{directory} could not be removed: {'; '.join(problems)}")

    async def list(self) -> Records:
        """Every host directory below this user's scratch space, whoever started it."""
        return await asyncio.to_thread(self._list)

    def _list(self) -> Records:
        found = []
        for directory in sorted(path for root in self._roots() for path in root.iterdir() if is_folder(path)):
            record = read_record(directory) or {}
            if record.get(INSTANCE):
                continue
            if not record and time.time() - directory.stat().st_mtime < BEING_MADE_S:
                continue
            state = "running" if is_running(directory, record) else ("dead" if "pid" in record else "starting")
            created_s = float(record.get("created_s", directory.stat().st_mtime))
            found.append(HostRecord(directory.name, str(record.get("owner", "")), state, created_s, str(directory)))
        return found

    def _roots(self) -> Roots:
        """This user's folders in every scratch space that may have been chosen; never one that others can change."""
        places = [self._root.parent] if self._context.scratch_dir else candidates()
        found = []
        for place in dict.fromkeys(places):
            with contextlib.suppress(OSError):
                if check_private(place / own_name()):
                    found.append(place / own_name())
        return found

    def _directory(self, name: str) -> Path:
        """Where the host of this name is, or would be started."""
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"not a host name: {name!r}")
        there = [root / name for root in self._roots() if (root / name).exists()]
        return there[0] if there else self._root / name

    def _record(self, name: str, address: str) -> dict[str, Any]:
        return {"name": name, "owner": self._context.owner, "address": address, "created_s": time.time()}

    def _prepare(self, directory: Path) -> str:
        """Make the host's directory with all that the server is started from; the address it will listen at.

        Only the scratch space below is given to the user of the server: what root reads or runs stays root's.
        """
        folder = self._make_folder(directory.name)
        try:
            os.fchmod(folder, OWN_MODE)
            write_record(directory, self._record(directory.name, ""))  # first: a gc that looks now must see the owner
            os.mkdir("scratch", 0o700, dir_fd=folder)
            scratch = os.open("scratch", FOLDER, dir_fd=folder)
            os.fchmod(scratch, OWN_MODE)
            if self._options.user is not None:
                entry = pwd.getpwnam(self._options.user)
                os.fchown(scratch, entry.pw_uid, entry.pw_gid)
            os.close(scratch)
            for name, data, mode in (("server.py", pack(), 0o644), (ALIVE, b"", 0o600), ("server.log", b"", 0o600)):
                write_new(folder, name, data, mode)
        finally:
            os.close(folder)
        address = f"unix:{_socket_path(directory)}"
        write_record(directory, self._record(directory.name, address))
        return address

    def _make_folder(self, name: str) -> int:
        """A host's folder, opened. A pool that shares the scratch space may remove the empty root at any moment."""
        for attempt in range(ROOT_TRIES):
            try:
                root = open_private(self._root, OWN_MODE)
                try:
                    require_space(self._root, self._context.scratch_min_mb)
                    os.mkdir(name, 0o700, dir_fd=root)
                    return os.open(name, FOLDER, dir_fd=root)
                finally:
                    os.close(root)
            except FileNotFoundError:
                if attempt == ROOT_TRIES - 1:
                    raise
        raise AssertionError("the last attempt raises")

    def _clean(self, directory: Path) -> Problems:
        """Have what the server left removed, as the user it ran as: root must not act on what that user wrote."""
        scratch = directory / "scratch"
        try:
            owner = os.lstat(scratch)
        except FileNotFoundError:
            return []
        if owner.st_uid == os.geteuid():
            return clean(str(scratch))
        done = subprocess.run(
            [self._options.python, str(directory / "server.py"), "--scratch", str(scratch), "--cleanup"],
            env=_server_environment(),
            cwd="/",
            user=owner.st_uid,
            group=owner.st_gid,
            extra_groups=[],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return [] if done.returncode == 0 else (done.stderr.strip() or "the clean-up failed").splitlines()[-5:]

    async def _launch(self, directory: Path, address: str) -> asyncio.subprocess.Process:
        name = directory.name
        creating = asyncio.ensure_future(self._create_process(directory, address))
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

    async def _create_process(self, directory: Path, address: str) -> asyncio.subprocess.Process:
        arguments = [str(directory / "server.py"), "--scratch", str(directory / "scratch"), "--die-with-parent"]
        for folder in (self._context.state_dir, self._root):
            arguments += ["--keep-out", str(folder)]
        arguments += ["--listen", address, *self._context.server_arguments(directory.name, self._options.level)]
        user = None if self._options.user is None else pwd.getpwnam(self._options.user)
        with (directory / "server.log").open("wb") as log_file, (directory / ALIVE).open("rb") as alive:
            return await asyncio.create_subprocess_exec(
                self._options.python,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                pass_fds=[alive.fileno()],
                env=_server_environment(),
                cwd="/",
                # Its own session: Ctrl-C in a terminal is for the client, which then ends its servers properly.
                start_new_session=True,
                # uvloop has no `user`, `group` and `extra_groups`
                preexec_fn=None if user is None else partial(_become, user.pw_uid, user.pw_gid),
            )

    async def _ready(self, directory: Path, process: asyncio.subprocess.Process) -> dict[str, Any]:
        assert process.stdout is not None
        line = await process.stdout.readline()
        try:
            ready = json.loads(line)
        except ValueError:
            ready = None
        if isinstance(ready, dict) and "error" not in ready:
            return ready
        message = str(ready["error"]) if isinstance(ready, dict) else ""
        log_text = (directory / "server.log").read_text(errors="replace").strip()[-LOG_TAIL:]
        raise start_error(directory.name, message or log_text or f"the server said {line!r}")

    async def _end_process(self, directory: Path, record: Mapping[str, Any]) -> None:
        process = self._processes.pop(directory.name, None)
        if process is not None:
            await _end_child(process)
        elif is_running(directory, record):
            await _end_by_pid(directory, record)


def _become(uid: int, gid: int) -> None:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)


def _server_environment() -> dict[str, str]:
    """Almost nothing of the client's environment: it may hold secrets, and the server runs a model's commands.

    What the interpreter itself needs ends here: slots get an environment of their own.
    """
    needed = {name: os.environ[name] for name in INTERPRETER_NEEDS if name in os.environ}
    return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", **needed}


def _socket_path(directory: Path) -> Path:
    """In the scratch space, which is the server's; where that path is too long, in another folder of the server's."""
    path = directory / "scratch" / "s"
    if len(str(path)) <= SOCKET_PATH_LIMIT:
        return path
    server = (directory / "scratch").stat()
    name = hashlib.sha256(str(path).encode()).hexdigest()[:16]
    refusals = []
    for place in SHORT_PLACES:
        root = place / sockets_name()
        try:
            os.close(open_private(root, OWN_MODE))
            (root / name).mkdir(mode=0o700, exist_ok=True)
            os.chown(root / name, server.st_uid, server.st_gid)
        except OSError as error:
            refusals.append(str(error))
            continue
        return root / name / "s"
    raise StateError(f"{path} is too long for a socket, and no shorter place can be used: {'; '.join(refusals)}")


def _remove(directory: Path, address: str) -> Problems:
    """Remove a host's directory, its socket where that stands apart, and what is empty then."""
    problems = remove_tree(directory)
    roots = [directory.parent]
    apart = Path(address.removeprefix("unix:")).parent
    if apart.parent.name == sockets_name():
        problems += remove_tree(apart)
        roots.append(apart.parent)
    for root in roots:
        with contextlib.suppress(OSError):  # others are in it
            root.rmdir()
    return problems


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


async def _end_by_pid(directory: Path, record: Mapping[str, Any]) -> None:
    """End a server that another process started: SIGTERM, then SIGKILL."""
    try:
        # Opened before the process is proven ours: the signal cannot reach another one that gets its number.
        process = os.pidfd_open(int(record["pid"]))
    except ProcessLookupError:
        return
    try:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not is_running(directory, record):
                return
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, number)
            await asyncio.to_thread(select.select, [process], [], [], TERM_GRACE_S)
    finally:
        os.close(process)
