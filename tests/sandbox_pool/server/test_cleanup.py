"""A killed server leaves nothing: not at once, and not after `--cleanup` or the next start."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import uuid
from pathlib import Path

import pytest

from sandbox_pool.server.cleanup import clean
from sandbox_pool.server.isolation.cgroups import Cgroups
from sandbox_pool.server.isolation.layers import shared_memory_paths
from sandbox_pool.spec import SandboxSpec
from support.pool_wait import eventually
from support.slot_server import Server, running_server, server_command

pytestmark = pytest.mark.asyncio(loop_scope="module")


def processes_with(mark: str) -> list[int]:
    """Processes that have this text among their arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (
                    mark in (entry / "cmdline").read_bytes().decode("utf-8", "replace")
                    and int(entry.name) != os.getpid()
                ):
                    found.append(int(entry.name))
    return found


def exists(path: str) -> bool:
    return Path(path).exists()


def mounts() -> str:
    return Path("/proc/self/mountinfo").read_text()


def cgroups_of(scratch: Path) -> list[Path]:
    name = Cgroups(str(scratch)).name
    return [path for path in Path("/sys/fs/cgroup").glob(f"**/{name}") if path.is_dir()]


async def occupy(server: Server, mark: str) -> None:
    """Lease every slot and leave daemons in it."""
    for slot in range(4):
        sandbox = await server.client.lease(slot, task_id="t", spec=SandboxSpec())
        await sandbox.exec(f"touch f; setsid bash -c 'while :; do sleep 1; done' {mark} & exec -a {mark} sleep 900 &")
        await sandbox.snapshot()
    await eventually(lambda: len(processes_with(mark)) >= 8)


@pytest.mark.parametrize("level", ["namespaces", "plain"])
async def test_after_sigkill_cleanup_leaves_nothing(level: str) -> None:
    mark = f"mark-{uuid.uuid4().hex}"
    async with running_server("--level", level) as server:
        await occupy(server, mark)
        scratch = server.directory / "scratch"
        server.process.kill()
        await server.process.wait()
        command = server_command(sys.executable, server.directory, "--cleanup")
        cleaner = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, errors = await cleaner.communicate()
        assert (cleaner.returncode, errors) == (0, b"")
        assert processes_with(mark) == []
        assert processes_with(str(server.directory)) == []
        assert cgroups_of(scratch) == []
        assert list(scratch.iterdir()) == []
        assert not any(exists(path) for path in shared_memory_paths(str(scratch)))


async def test_no_mount_of_ours_is_ever_visible_on_the_host() -> None:
    async with running_server() as server:
        await occupy(server, f"mark-{uuid.uuid4().hex}")
        assert str(server.directory) not in mounts()


async def test_cleanup_ends_a_server_that_is_still_alive() -> None:
    async with running_server() as server:
        await asyncio.to_thread(clean, str(server.directory / "scratch"))
        assert await asyncio.wait_for(server.process.wait(), 20) != 0


async def test_cleaning_nothing_is_fine(tmp_path: Path) -> None:
    assert clean(str(tmp_path)) == []


async def test_closing_stdin_ends_the_server_with_all_it_holds() -> None:
    mark = f"mark-{uuid.uuid4().hex}"
    async with running_server() as server:
        await occupy(server, mark)
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert await asyncio.wait_for(server.process.wait(), 20) == 0
        assert processes_with(mark) == []
        assert cgroups_of(server.directory / "scratch") == []
