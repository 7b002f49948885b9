"""A real slot server for tests, started as providers start it: the packed file, a token on stdin, a ready line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sandbox_pool.client.host_client import HostClient
from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.server.build.packing import pack
from sandbox_pool.spec import SandboxSpec

NOBODY = 65534
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/bin")


@dataclass
class Server:
    """A running server and what is needed to reach it."""

    process: asyncio.subprocess.Process
    directory: Path
    address: str
    token: str
    ready: dict[str, Any]
    client: HostClient
    _next: int = 0
    spec: SandboxSpec = field(default_factory=SandboxSpec)

    async def connect(self) -> HostClient:
        """Another connection."""
        return await HostClient.connect(self.address, self.token)

    @contextlib.asynccontextmanager
    async def lease(self, spec: SandboxSpec | None = None, snapshot: str | None = None) -> AsyncIterator[Sandbox]:
        """A sandbox in a free slot, given back and proven clean at the end."""
        wanted = spec or self.spec
        free = next(slot.slot for slot in await self.client.slots() if slot.state == "free")
        sandbox = await self.client.lease(free, task_id=f"task-{free}", spec=wanted, snapshot=snapshot)
        try:
            yield sandbox
        finally:
            report = await self.client.release(free, sandbox.epoch)
            assert report.clean, report.problems


def pids_below(pid: int) -> list[tuple[int, str]]:
    """All processes that a process and its children started, with their names."""
    found: list[tuple[int, str]] = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            found += [(int(child), Path(f"/proc/{child}/comm").read_text().strip()), *pids_below(int(child))]
    return found


def names_below(pid: int) -> list[str]:
    """Their names alone."""
    return [name for _, name in pids_below(pid)]


def server_command(python: str, directory: Path, *arguments: str) -> list[str]:
    """How the packed server in `directory` is started."""
    return [python, str(directory / "server.pyz"), "--scratch", str(directory / "scratch"), *arguments]


@contextlib.contextmanager
def server_directory(user: int | None = None) -> Iterator[Path]:
    """A directory with the packed server in it, owned by `user`."""
    directory = Path(tempfile.mkdtemp(prefix="hs-", dir="/tmp"))
    try:
        (directory / "server.pyz").write_bytes(pack())
        (directory / "scratch").mkdir()
        directory.chmod(0o755)
        if user is not None:
            for path in (directory, directory / "scratch"):
                os.chown(path, user, user)
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.asynccontextmanager
async def running_server(
    *arguments: str,
    slots: int = 4,
    user: int | None = None,
    python: str = sys.executable,
    listen: str | None = None,
    prefix: Sequence[str] = (),
) -> AsyncIterator[Server]:
    """A server that is ended, cleaned and removed at the end. A `prefix` puts it elsewhere, as `user`."""
    with server_directory(user) as directory:
        token = secrets.token_hex(16)
        address = listen or f"unix:{directory}/s"
        command = server_command(python, directory, "--listen", address, "--slots", str(slots), "--die-with-parent")
        process = await asyncio.create_subprocess_exec(
            *prefix,
            *command,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "SERVER_SECRET": "secret-of-the-server"},
            user=None if prefix else user,
            group=None if prefix else user,
            extra_groups=None if prefix or user is None else [],
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(token.encode() + b"\n")
        ready = json.loads(await process.stdout.readline())
        try:
            if "error" in ready:
                raise RuntimeError(ready["error"])
            client = await HostClient.connect(ready["address"], token)
            yield Server(process, directory, ready["address"], token, ready, client)
            await client.close()
        finally:
            process.stdin.close()
            await asyncio.wait_for(process.wait(), 20)


@contextlib.asynccontextmanager
async def server_at_level(level: str, user: int | None) -> AsyncIterator[Server]:
    """A server at one isolation level, run by `user`; the test is skipped where this machine cannot do it."""
    if user is not None and SYSTEM_PYTHON is None:
        pytest.skip("no Python that an ordinary user may run")
    python = (user is not None and SYSTEM_PYTHON) or sys.executable
    try:
        async with running_server("--level", level, user=user, python=python) as running:
            yield running
    except RuntimeError as error:
        pytest.skip(f"this machine cannot do it: {error}")
