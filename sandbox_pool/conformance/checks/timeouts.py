"""Commands that take too long, and callers that stop waiting."""

from __future__ import annotations

import asyncio
import contextlib
import time

from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.conformance.check import IS_ALIVE, check, expect, expect_equal
from sandbox_pool.conformance.context import CheckContext


@check()
async def a_timeout_is_124_with_what_was_printed(ctx: CheckContext) -> None:
    """A timeout is exit code 124, marked, with the output so far."""
    async with ctx.lease() as box:
        result = await box.exec("echo before; sleep 60", timeout_s=2.0)
    expect_equal((result.exit_code, result.timed_out, result.output), (124, True, "before\n"))


@check()
async def a_timeout_is_prompt(ctx: CheckContext) -> None:
    """A timeout ends the call when it is due, also for a command that ignores signals."""
    async with ctx.lease() as box:
        began_s = time.monotonic()
        result = await box.exec("trap '' TERM INT HUP; while :; do sleep 1; done", timeout_s=0.5)
        took_s = time.monotonic() - began_s
    expect(result.timed_out, "it was not marked as timed out")
    expect(took_s < 10, f"the call took {took_s:.1f} s")


@check("pgrep")
async def a_timeout_kills_the_whole_tree(ctx: CheckContext) -> None:
    """A timeout kills every process of that command, also what called setsid or forked twice."""
    async with ctx.lease() as box:
        n = ctx.unique_seconds()
        command = f"setsid sleep {n}1 & (setsid bash -c 'sleep {n}2 & sleep {n}3' &) ; nohup sleep {n}4 & sleep {n}5"
        await box.exec(command, timeout_s=0.7)
        left = await box.exec(f"sleep 0.3; pgrep -f '^sleep {n}' | wc -l")
    expect_equal(left.output.strip(), "0", "processes left of the command")


@check()
async def a_timeout_spares_everything_else(ctx: CheckContext) -> None:
    """A timeout leaves other commands and earlier background processes of the slot alone."""
    async with ctx.lease() as box:
        await box.exec("sleep 55 & echo $! > pid")
        other = asyncio.create_task(box.exec("sleep 1.5; echo other"))
        await box.exec("sleep 60", timeout_s=0.4)
        alive = await box.exec(IS_ALIVE)
        expect_equal(((await other).output, alive.output), ("other\n", "alive\n"))


@check()
async def the_slot_lives_on_after_a_timeout(ctx: CheckContext) -> None:
    """After a timeout the next command runs with the state from before."""
    async with ctx.lease() as box:
        await box.exec("export KEPT=yes; mkdir here; cd here")
        await box.exec("sleep 60", timeout_s=0.3)
        result = await box.exec("echo $KEPT; basename $PWD")
    expect_equal(result.output, "yes\nhere\n", "output")


@check("pgrep")
async def cancelling_a_call_kills_its_command(ctx: CheckContext) -> None:
    """Cancelling the call kills the command's whole tree and nothing else."""
    async with ctx.lease() as box:
        await box.exec("sleep 56 & echo $! > pid")
        n = ctx.unique_seconds()
        task = asyncio.create_task(box.exec(f"touch began; setsid sleep {n}1 & sleep {n}2"))
        await ctx.until(lambda: _exists(box, "began"))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        left = await box.exec(f"sleep 0.3; pgrep -f '^sleep {n}' | wc -l; {IS_ALIVE}")
    expect_equal(left.output.split(), ["0", "alive"], "processes left, and the one from before")


@check()
async def a_fast_command_never_times_out(ctx: CheckContext) -> None:
    """A command that ends in time is not marked, whatever it left in the background."""
    async with ctx.lease() as box:
        result = await box.exec("sleep 30 & exit 0", timeout_s=20)
    expect_equal((result.exit_code, result.timed_out), (0, False))


@check()
async def exit_124_of_its_own_is_no_timeout(ctx: CheckContext) -> None:
    """A command that itself exits with 124 is not marked as timed out."""
    async with ctx.lease() as box:
        result = await box.exec("exit 124", timeout_s=20)
    expect_equal((result.exit_code, result.timed_out), (124, False))


@check(timeout_s=40.0)
async def a_long_command_says_that_it_is_alive(ctx: CheckContext) -> None:
    """A running command reports activity every ten seconds, so that no watchdog takes it for dead."""
    reports: list[object] = []
    async with ctx.lease() as box:
        await box.exec("sleep 11.5", on_activity=lambda *seen: reports.append(seen), timeout_s=30)
    expect(len(reports) >= 1, "nothing was reported in 11.5 s")


async def _exists(box: Sandbox, path: str) -> bool:
    return await box.stat(path) is not None
