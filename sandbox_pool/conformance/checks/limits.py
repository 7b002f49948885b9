"""What one tenant may use, and that the others do not feel it."""

from __future__ import annotations

import asyncio
import time

from sandbox_pool.conformance.check import check, expect, expect_equal
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.spec import SandboxSpec

EAT_MEMORY = "python3 -c \"b=[]\nfor i in range(64): b.append(b'x' * (8<<20))\nprint('ate it all')\""
FORK = """import os, time
count = 0
try:
    while count < 200:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        count += 1
except OSError:
    pass
print(count)
"""


@check("memory-limit", "python3")
async def a_memory_hog_is_stopped(ctx: CheckContext) -> None:
    """A command that uses more memory than allowed fails; the slot lives on."""
    async with ctx.lease(SandboxSpec(memory_mb=128)) as box:
        result = await box.exec(EAT_MEMORY, timeout_s=40)
        after = await box.exec("echo fine")
    # bash quotes the killed command in its message: only a line of its own is the program's.
    expect("ate it all" not in result.output.splitlines(), "it got 512 MB with 128 MB allowed")
    expect(result.exit_code != 0, "it ended with exit code 0")
    expect_equal(after.output, "fine\n", "output of the next command")


@check("memory-limit", "python3")
async def memory_within_the_limit_is_given(ctx: CheckContext) -> None:
    """Memory below the limit can be used."""
    async with ctx.lease(SandboxSpec(memory_mb=1024)) as box:
        result = await box.exec(EAT_MEMORY, timeout_s=40)
    expect_equal(result.output, "ate it all\n", "output")


@check("memory-limit", "python3")
async def a_memory_hog_does_not_hurt_its_neighbour(ctx: CheckContext) -> None:
    """While one tenant runs out of memory, the other's commands work."""
    async with ctx.lease(SandboxSpec(memory_mb=96)) as hog, ctx.lease() as other:
        task = asyncio.create_task(hog.exec(EAT_MEMORY, timeout_s=40))
        results = [await other.exec("echo ok") for _ in range(5)]
        await task
    expect_equal({result.output for result in results}, {"ok\n"}, "the neighbour's output")


@check("pids-limit")
async def a_fork_bomb_stays_in_its_slot(ctx: CheckContext) -> None:
    """A fork bomb hits its limit; neighbour and host go on, and the slot can be given back."""
    async with ctx.lease(SandboxSpec(pids=64)) as box, ctx.lease() as other:
        task = asyncio.create_task(box.exec("bomb() { bomb | bomb & }; bomb; sleep 3", timeout_s=6))
        await asyncio.sleep(0.5)
        neighbour = await other.exec("echo ok", timeout_s=30)
        await task
    expect_equal(neighbour.output, "ok\n", "the neighbour's output")
    async with ctx.lease() as box:
        left = await box.exec("echo clean")
    expect_equal(left.output, "clean\n", "the next lease")


@check("pids-limit", "python3")
async def the_number_of_processes_is_limited(ctx: CheckContext) -> None:
    """A slot gets no more processes than its spec says."""
    async with ctx.lease(SandboxSpec(pids=100)) as box:
        await box.write_file("fork.py", FORK)
        result = await box.exec("python3 fork.py", timeout_s=15)
    # gVisor lets its groups grow by eight more.
    expect(80 <= int(result.output) <= 120, f"{result.output.strip()} processes with 100 allowed")


@check("disk-limit")
async def a_disk_filler_is_stopped(ctx: CheckContext) -> None:
    """A command that writes more than allowed gets `No space left`; the slot and its neighbours live on."""
    async with ctx.lease(SandboxSpec(disk_mb=64)) as box, ctx.lease() as other:
        result = await box.exec("head -c 200000000 /dev/zero > big; echo $?; du -m big | cut -f1", timeout_s=40)
        neighbour = await other.exec("head -c 20000000 /dev/zero > some && echo ok")
        await box.remove("big")
        after = await box.exec("echo x > small && cat small")
    code, size = result.output.split()[-2:]
    expect(code != "0", "200 MB were written with 64 MB allowed")
    expect(int(size) <= 80, f"{size} MB were written with 64 MB allowed")
    expect_equal((neighbour.output, after.output), ("ok\n", "x\n"))


@check("disk-limit", "own-root")
async def the_disk_limit_covers_tmp(ctx: CheckContext) -> None:
    """/tmp, /dev/shm and the root cannot be used to get around the disk limit."""
    async with ctx.lease(SandboxSpec(disk_mb=64, memory_mb=512)) as box:
        result = await box.exec(
            "for d in /tmp /var/tmp /dev/shm /root; do head -c 90000000 /dev/zero 2>/dev/null > $d/fill || true; done; "
            "du -cm /tmp/fill /var/tmp/fill /dev/shm/fill /root/fill | tail -1 | cut -f1",
            timeout_s=60,
        )
    total = int(result.output.split()[-1])
    expect(total <= 64 * 4, f"{total} MB were written in all")


@check("cpu-limit")
async def cpu_is_limited(ctx: CheckContext) -> None:
    """A slot gets no more processor time than its spec says."""
    command = "timeout 2 sh -c 'while :; do :; done'; cat /proc/self/stat > /dev/null; times"
    async with ctx.lease(SandboxSpec(cpu=0.2)) as box:
        result = await box.exec(command, timeout_s=20)
    used = [part for line in result.output.splitlines()[1:] for part in line.split()]
    seconds = sum(_seconds(part) for part in used)
    expect(seconds < 1.5, f"{seconds:.1f} s of processor time in 2 s with 0.2 cores allowed")


@check(timeout_s=90.0)
async def a_log_flood_is_contained(ctx: CheckContext) -> None:
    """Endless output until the timeout fills neither memory nor disk, and the slot lives on."""
    async with ctx.lease(SandboxSpec(disk_mb=64)) as box:
        began_s = time.monotonic()
        result = await box.exec("yes 'a line of a log that never ends'", timeout_s=3)
        took_s = time.monotonic() - began_s
        after = await box.exec("echo fine; touch still-room || true")
    expect(result.timed_out, "it was not marked as timed out")
    expect(took_s < 30, f"the call took {took_s:.1f} s")
    expect("fine" in after.output, f"output of the next command: {after.output!r}")


@check("pids-limit")
async def sixteen_tenants_at_once(ctx: CheckContext) -> None:
    """Tenants run at the same time, not one after another."""
    count = min(ctx.info.slots, 16) - 4

    async def one() -> str:
        async with ctx.lease() as box:
            return (await box.exec("sleep 0.5; echo done")).output

    began_s = time.monotonic()
    outputs = await asyncio.gather(*(one() for _ in range(max(count, 2))))
    took_s = time.monotonic() - began_s
    expect_equal(set(outputs), {"done\n"}, "outputs")
    expect(took_s < 0.5 * len(outputs) * 0.75 + 1.5, f"{len(outputs)} tenants took {took_s:.1f} s")


def _seconds(text: str) -> float:
    minutes, _, rest = text.rstrip("s").partition("m")
    return float(minutes) * 60 + float(rest)
