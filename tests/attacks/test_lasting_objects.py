"""What a slot makes in the kernel does not outlive it, neither in the host's memory nor for the next slot."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from support.slot_server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = 0x5AFE0000
MAKE = f"""
import ctypes, os
libc = ctypes.CDLL(None)
made = 0
for key in range({KEY}, {KEY} + 8):
    made += libc.shmget(key, 1 << 20, 0o1666) >= 0
    made += libc.msgget(key, 0o1666) >= 0
    made += libc.semget(key, 1, 0o1666) >= 0
libc.mq_open(b"/safe", os.O_CREAT | os.O_RDWR, 0o666, None)
print("tried")
"""


def of_the_host() -> list[str]:
    tables = "\n".join(Path(f"/proc/sysvipc/{kind}").read_text() for kind in ("shm", "msg", "sem"))
    mine = {str(key) for key in range(KEY, KEY + 8)}
    return [line for line in tables.splitlines() if line.split() and line.split()[0] in mine]


async def test_shared_memory_queues_and_semaphores_do_not_outlive_the_slot(server: Server) -> None:
    async with server.lease() as agent:
        assert (await agent.exec(f"python3 - <<'E'\n{MAKE}\nE")).output == "tried\n"
    assert await asyncio.to_thread(of_the_host) == []
