"""A command has no right over anything but its own slot, whatever its server could do."""

from __future__ import annotations

import os

import pytest

from support.slot_server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOK = r"""
import ctypes, os, re
status = open("/proc/self/status").read()
print("capabilities", re.search(r"CapEff:\s*(\w+)", status)[1], re.search(r"NoNewPrivs:\s*(\d)", status)[1])
for name, attempt in {
    "chown": lambda: (open("f", "w").close(), os.chown("f", 1234, 1234)),
    "setuid": lambda: os.setresuid(1234, 1234, 1234),
    "groups": lambda: os.setgroups([4, 27]),
}.items():
    try:
        attempt()
        print(name, "done")
    except OSError as error:
        print(name, "refused")
"""


async def test_a_command_without_a_root_of_its_own_has_no_capability(server: Server) -> None:
    """Also where the server's user may map ranges of ids: its slots must not be root of that namespace."""
    if server.client.info.isolation == "namespaces":
        pytest.skip("root of its own slot has rights there")
    async with server.lease() as agent:
        await agent.write_file("look.py", LOOK)
        seen = (await agent.exec("python3 look.py")).output
    assert seen.splitlines() == ["capabilities 0000000000000000 1", "chown refused", "setuid refused", "groups refused"]


READ = r"""
import os, re, resource
for name in os.listdir("/proc"):
    if not name.isdigit() or int(name) in (os.getpid(), os.getppid()):
        continue
    try:
        words = open(f"/proc/{name}/cmdline", "rb").read().split(b"\0")
    except OSError:
        continue
    if b"slot-server" in b" ".join(words) or b"zygote" in words or words[0].startswith(b"slot-"):
        for file in ("mem", "environ", "maps", "fd/0", "fd/3", "root/etc/hostname", "cwd"):
            try:
                open(f"/proc/{name}/{file}", "rb").read(1) if file != "cwd" else os.readlink(f"/proc/{name}/cwd")
            except OSError:
                continue
            print("read", words[0], file)
        try:
            os.kill(int(name), 0)
            print("signalled", words[0])
        except OSError:
            pass
        for limit in (resource.RLIMIT_NOFILE, resource.RLIMIT_CPU, resource.RLIMIT_NPROC):
            try:
                resource.prlimit(int(name), limit)
                print("limited", words[0])
            except OSError:
                pass
for what, attempt in {
    "idle": lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
    "nice": lambda: os.setpriority(os.PRIO_PROCESS, 1, 19),
    "nice user": lambda: os.setpriority(os.PRIO_USER, 0, 19),
    "nice group": lambda: os.setpriority(os.PRIO_PGRP, 1, 19),
}.items():
    try:
        attempt()
        print("slowed", what)
    except OSError:
        pass
resource.prlimit(0, resource.RLIMIT_NOFILE, (100, 100))
os.setpriority(os.PRIO_PROCESS, 0, 1)
os.sched_setaffinity(os.getpid(), os.sched_getaffinity(0))
print("looked")
"""


async def test_the_processes_that_own_a_slot_cannot_be_read_signalled_or_starved_from_it(server: Server) -> None:
    async with server.lease() as agent, server.lease() as neighbour:
        process = await neighbour.spawn("sleep 60")
        await agent.write_file("read.py", READ)
        seen = (await agent.exec("python3 read.py")).output.splitlines()
        assert await process.poll() is None
    own_init = server.client.info.isolation == "namespaces" or os.geteuid() != 0
    assert [line for line in seen if not (own_init and line.startswith("signalled"))] == ["looked"]
