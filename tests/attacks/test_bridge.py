"""Attacks through the socket by which scripts in a slot call tools outside of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.slot_server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLOOD = """
import socket, sys
held = []
for i in range(300):
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(0.2)
    try:
        s.connect(sys.argv[1])
        s.sendall(b"x" * 8_000_000)
    except OSError:
        pass
    held.append(s)
"""
CALLS = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.settimeout(1)
try:
    for i in range(100_000):
        s.sendall(b"call\\n")
except OSError:
    pass
"""


def memory_mb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS"))


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def test_connections_do_not_fill_the_server(server: Server) -> None:
    async with server.lease() as agent, server.lease() as neighbour:
        await agent.write_file("flood.py", FLOOD)
        before = memory_mb(server.process.pid)
        async with agent.serve(f"{agent.workdir}/s", handler=answer):
            flood = asyncio.create_task(agent.exec("python3 flood.py $PWD/s", timeout_s=60))
            while not flood.done():
                assert (await neighbour.exec("echo here", timeout_s=20)).output == "here\n"
                assert memory_mb(server.process.pid) - before < 400
            assert descriptors(server.process.pid) < 200
        await flood


async def answer(line: bytes) -> bytes:
    return line


async def test_calls_without_end_do_not_pile_up_outside(server: Server) -> None:
    waiting: list[bytes] = []
    go_on = asyncio.Event()

    async def wait(line: bytes) -> bytes:
        waiting.append(line)
        await go_on.wait()
        return line

    async with server.lease() as agent:
        await agent.write_file("calls.py", CALLS)
        async with agent.serve(f"{agent.workdir}/s", handler=wait):
            await agent.exec("python3 calls.py $PWD/s", timeout_s=60)
            assert 0 < len(waiting) <= 32
            go_on.set()
