"""Attacks that use up what a slot has: they end as the agent's own failure, never as a lost slot."""

from __future__ import annotations

import contextlib
import os

import pytest

from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.errors import SandboxDestroyed, SandboxFileError
from sandbox_pool.spec import SandboxSpec
from support.slot_server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

SMALL = SandboxSpec(memory_mb=96, disk_mb=1024, pids=64)
FILLS = {
    "files": "head -c 400M /dev/zero | tr '\\0' x > f",
    "shared memory": "for i in 1 2; do head -c 60M /dev/zero > /dev/shm/$i & head -c 200M /dev/zero > f$i & done; wait",
    "processes": "for i in 1 2 3 4; do tail /dev/zero & done; wait",
    "hidden": "echo -999 > /proc/self/oom_score_adj; exec tail /dev/zero",
    "sleepers": "sh -c 'while :; do sleep 1000 & done' 2>/dev/null; true",
    "bomb": "b() { b | b & }; b; sleep 0.5",
}


TAKE_TERMINALS = """
import os
held = []
try:
    while len(held) < 500:
        held.append(os.openpty())
except OSError:
    pass
print(len(held))
"""


async def use(sandbox: Sandbox) -> None:
    """Whatever a rollout asks of its slot."""
    await sandbox.exec("echo here", timeout_s=20)
    for call in (
        lambda: sandbox.write_file("w", b"x"),
        lambda: sandbox.read_file("w"),
        lambda: sandbox.stat("w"),
        lambda: sandbox.spawn("true"),
    ):
        with contextlib.suppress(SandboxFileError):
            await call()


@pytest.mark.parametrize("what", FILLS)
async def test_a_full_slot_is_not_a_lost_one(server: Server, what: str) -> None:
    if "memory" in server.client.info.missing and what not in ("sleepers", "bomb"):
        pytest.skip("no limit of memory here, and the machine is not to be filled")
    if os.geteuid() != 0 and server.client.info.isolation != "namespaces":
        pytest.skip("the limit of processes is the user's here: tests beside a bomb would starve")
    async with server.lease(SMALL) as agent, server.lease() as neighbour:
        with contextlib.suppress(SandboxDestroyed):
            await agent.exec(FILLS[what], timeout_s=20)
            for _ in range(3):
                await use(agent)
            await agent.stop_processes()
        assert (await neighbour.exec("echo here")).output == "here\n"


@pytest.mark.parametrize("pty", [False, True])
async def test_a_stopped_keeper_keeps_nobody_waiting(server: Server, pty: bool) -> None:
    """Else a rollout would wait until its deadline, and be tried again."""
    async with server.lease() as agent:
        process = await agent.spawn("kill -STOP $PPID; sleep 600", pty=pty)
        await process.wait(timeout_s=1)
        with contextlib.suppress(SandboxFileError):
            await process.log()
        with contextlib.suppress(SandboxFileError):
            await process.kill()
        await use(agent)


async def test_stopping_everything_again_and_again_keeps_nobody_waiting(server: Server) -> None:
    async with server.lease() as agent:
        await agent.exec("(setsid bash -c 'while :; do kill -STOP -1; done' >/dev/null 2>&1 &)", timeout_s=5)
        for _ in range(3):
            with contextlib.suppress(SandboxFileError):
                await (await agent.spawn("true", pty=True)).kill()
            await use(agent)
        await agent.stop_processes()


async def test_one_slot_does_not_take_all_terminals(server: Server) -> None:
    if server.client.info.isolation != "namespaces":
        pytest.skip("slots have no terminals of their own at this level")
    async with server.lease() as agent:
        await agent.write_file("take.py", TAKE_TERMINALS)
        assert int((await agent.exec("python3 take.py")).output) <= 64
