"""Leases and resets: what one task left, the next must not find."""

from __future__ import annotations

import asyncio
import contextlib

from sandbox_pool.conformance.check import check, expect, expect_equal, expect_error
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.errors import AcquireTimeout, SandboxLost, StaleLease
from sandbox_pool.pool.lease import Lease
from sandbox_pool.spec import SandboxSpec


@check()
async def files_are_gone_after_release(ctx: CheckContext) -> None:
    """Nothing a task wrote is there for the next task in the same slot."""
    await _everybody(
        ctx, "mkdir -p deep/er; echo x > deep/er/hrl-left; ln -s / loop; ln -s deep dirlink; mkfifo pipe; echo y > .hid"
    )
    found = await _everybody(
        ctx,
        "ls -A; find . /tmp /var/tmp /dev/shm /root /home /run -xdev -name hrl-left 2>/dev/null | head -3",
        timeout_s=60,
    )
    expect_equal(set(found), {""}, "what later tasks found")


@check()
async def processes_are_gone_after_release(ctx: CheckContext) -> None:
    """No process survives its lease: not in the background, not as a daemon, not with signals ignored."""
    n = ctx.unique_seconds()
    daemon = f"trap '' TERM HUP INT; exec -a daemon sleep {n}1"
    await _everybody(ctx, f'nohup setsid bash -c "{daemon}" >/dev/null 2>&1 & disown; sleep {n}2 &')
    # The brackets keep the pattern from finding itself in the command line of grep.
    look = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -cE '[{n[0]}]{n[1:]}'"
    found = await _everybody(ctx, look)
    expect_equal({text.strip() for text in found}, {"0"}, "processes of earlier tasks that were seen")


@check()
async def shell_state_is_gone_after_release(ctx: CheckContext) -> None:
    """Variables, functions, aliases and directory of one task are not there for the next."""
    await _everybody(
        ctx, "export HRL_LEFT=1; hrl_left() { echo no; }; alias hrl_alias=ls; cd /; umask 077; ulimit -n 17"
    )
    found = await _everybody(ctx, 'echo "${HRL_LEFT-clean} $(type -t hrl_left)$(type -t hrl_alias) $(umask) $PWD"')
    for text in found:
        expect(text.startswith("clean  ") and not text.strip().endswith(" /"), f"a later task saw {text!r}")


@check()
async def a_released_sandbox_is_refused(ctx: CheckContext) -> None:
    """After release every call on the old sandbox is refused, also when the slot is leased again."""
    lease = await ctx.lease()
    await lease.release()
    with expect_error(StaleLease, SandboxLost):
        await lease.exec("echo still here")
    with expect_error(StaleLease, SandboxLost):
        await lease.write_file("x", b"late")
    found = await _everybody(ctx, "ls")
    expect_equal(set(found), {""}, "files of the late writer")


@check()
async def releasing_twice_is_harmless(ctx: CheckContext) -> None:
    """A second release does nothing, and never frees the slot of the next holder."""
    first = await ctx.lease()
    await first.release()
    async with ctx.lease() as box:
        await box.exec("echo mine > f")
        await first.release()
        expect_equal((await box.exec("cat f")).output, "mine\n", "the next holder's file")


@check()
async def a_running_command_ends_with_its_lease(ctx: CheckContext) -> None:
    """Release while a command runs ends the command, and its caller gets an error, not an exit code."""
    lease = await ctx.lease()
    task = asyncio.create_task(lease.exec("touch began; sleep 300"))
    await asyncio.sleep(0.3)
    await lease.release()
    with expect_error(StaleLease, SandboxLost):
        await asyncio.wait_for(task, 20)


@check()
async def a_lease_runs_out(ctx: CheckContext) -> None:
    """A lease with a time limit is taken back when it is over; its holder is refused from then on."""
    lease = await ctx.pool.lease("check-ttl", ttl_s=0.5)
    expect_equal((await lease.exec("echo in time")).output, "in time\n", "output")
    await asyncio.sleep(1.5)
    with expect_error(StaleLease, SandboxLost):
        await lease.exec("echo too late")
    await lease.release()


@check()
async def another_spec_gets_its_own_slot(ctx: CheckContext) -> None:
    """A task never gets the environment, files or limits of another task's spec."""
    async with ctx.lease(SandboxSpec(env={"HRL_SPEC": "one"}, files={"one": b"1"})) as box:
        one = await box.exec("echo $HRL_SPEC; ls")
    async with ctx.lease(SandboxSpec(env={"HRL_SPEC": "two"}, files={"two": b"2"})) as box:
        two = await box.exec("echo $HRL_SPEC; ls")
    async with ctx.lease() as box:
        none = await box.exec("echo ${HRL_SPEC-none}; ls")
    expect_equal((one.output, two.output, none.output), ("one\none\n", "two\ntwo\n", "none\n"))


@check()
async def every_slot_can_be_leased_at_once(ctx: CheckContext) -> None:
    """All slots that are free can be held at the same time, each usable, each its own."""
    held: list[Lease] = []
    try:
        while len(held) < ctx.info.slots:
            held.append(await ctx.pool.acquire(f"check-{len(held)}", timeout_s=1.0))
    except AcquireTimeout:
        pass  # other checks hold the rest
    try:
        await asyncio.gather(*(box.write_file("who", str(n).encode()) for n, box in enumerate(held)))
        outputs = await asyncio.gather(*(box.exec("cat who") for box in held))
    finally:
        await asyncio.gather(*(box.release() for box in held))
    expect(len(held) >= 1, "no slot could be leased")
    expect_equal([result.output for result in outputs], [str(n) for n in range(len(held))], "outputs")


@check()
async def a_cancelled_wait_takes_no_slot(ctx: CheckContext) -> None:
    """Cancelling a lease in any phase leaves no slot behind."""
    for delay_s in (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016):
        task = asyncio.create_task(ctx.pool.acquire("check-cancelled", timeout_s=20))
        await asyncio.sleep(delay_s)
        if not task.cancel():
            await (await task).release()
            continue
        with contextlib.suppress(asyncio.CancelledError):
            await (await task).release()
    await ctx.until(lambda: _nobody_is(ctx, "check-cancelled"))


@check()
async def many_leases_one_after_another(ctx: CheckContext) -> None:
    """Leasing and releasing again and again works every time and leaves no slot quarantined."""
    for n in range(40):
        async with ctx.lease() as box:
            expect_equal(
                (await box.exec(f"echo {n} > f; cat f; ls | wc -l")).output, f"{n}\n1\n", f"output of lease {n}"
            )
    quarantined = {slot for host in ctx.pool.status().hosts for slot in host.quarantined}
    expect_equal(quarantined, set(), "quarantined slots")


async def _nobody_is(ctx: CheckContext, task_id: str) -> bool:
    return all(task_id not in host.leased.values() for host in ctx.pool.status().hosts)


async def _everybody(ctx: CheckContext, command: str, timeout_s: float = 30.0) -> list[str]:
    """Run the command in as many slots at once as there are free, so that the next round meets the same slots."""

    async def one(barrier: asyncio.Barrier) -> str:
        async with ctx.lease() as box:
            output = (await box.exec(command, timeout_s=timeout_s)).output
            await barrier.wait()
            return output

    count = max(1, min(3, ctx.info.slots // 4))
    barrier = asyncio.Barrier(count)
    return list(await asyncio.gather(*(one(barrier) for _ in range(count))))
