"""Background processes: started, watched, fed, signalled and ended from outside."""

from __future__ import annotations

import asyncio
import signal

from sandbox_pool.client.process import Process
from sandbox_pool.conformance.check import IS_ALIVE, check, expect, expect_equal, expect_error
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.errors import SandboxError


@check()
async def exit_code_of_a_background_process(ctx: CheckContext) -> None:
    """A background process's real exit code comes back, not 127 and not -1."""
    async with ctx.lease() as box:
        process = await box.spawn("exit 42")
        expect_equal((await process.wait(), await process.poll()), (42, 42), "exit code")


@check()
async def a_running_process_polls_none(ctx: CheckContext) -> None:
    """poll of a running process is None."""
    async with ctx.lease() as box:
        process = await box.spawn("sleep 60")
        expect_equal(await process.poll(), None, "poll")
        await process.kill()


@check()
async def a_wait_ends_with_the_process(ctx: CheckContext) -> None:
    """wait returns when the process has ended, and not before."""
    async with ctx.lease() as box:
        process = await box.spawn("sleep 0.5; echo done > last; exit 3")
        expect_equal(await process.wait(), 3, "exit code")
        expect_equal(await box.read_file("last"), b"done\n", "what it did last")


@check()
async def a_wait_can_time_out(ctx: CheckContext) -> None:
    """wait with a timeout returns None and leaves the process running."""
    async with ctx.lease() as box:
        process = await box.spawn("sleep 60")
        expect_equal(await process.wait(timeout_s=0.3), None, "wait")
        expect_equal(await process.poll(), None, "poll")
        await process.kill()


@check()
async def the_log_can_be_followed(ctx: CheckContext) -> None:
    """The log is read in pieces by offset, nothing twice, nothing lost."""
    async with ctx.lease() as box:
        process = await box.spawn("for i in $(seq 50); do echo line $i; sleep 0.01; done")
        text, offset = "", 0
        while True:
            ended = await process.poll() is not None
            chunk = await process.log(offset)
            text, offset = text + chunk.data, chunk.next_offset
            if ended:
                break
            await asyncio.sleep(0.02)
    expect_equal(text, "".join(f"line {n}\n" for n in range(1, 51)), "the log")


@check()
async def a_long_log_rolls(ctx: CheckContext) -> None:
    """A log that grew too long keeps its end, and says how much was dropped."""
    async with ctx.lease() as box:
        process = await box.spawn("seq 1 2000000")
        await process.wait()
        chunk = await process.log(0)
    expect(chunk.data.endswith("2000000\n"), "the end is missing")
    expect(chunk.dropped > 0, "nothing is said to have been dropped")
    expect_equal(chunk.offset, chunk.dropped, "offset of what is left")


@check()
async def stdin_can_be_written_and_closed(ctx: CheckContext) -> None:
    """A background process reads what is written to it, until stdin is closed."""
    async with ctx.lease() as box:
        process = await box.spawn("while read -r line; do echo got $line; done; echo end")
        await process.write("one\n")
        await ctx.until(lambda: _has(process, "got one"))
        await process.write("two\n")
        await process.close_stdin()
        code = await process.wait()
        chunk = await process.log(0)
    expect_equal((code, chunk.data), (0, "got one\ngot two\nend\n"))


@check()
async def a_signal_arrives(ctx: CheckContext) -> None:
    """A signal reaches the process."""
    async with ctx.lease() as box:
        process = await box.spawn("trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.05; done")
        await ctx.until(lambda: _has(process, "ready"))
        await process.signal(signal.SIGUSR1)
        code = await process.wait(timeout_s=20)
        chunk = await process.log(0)
    expect_equal((code, chunk.data.splitlines()[-1]), (5, "caught"))


@check("pgrep")
async def kill_ends_the_whole_tree(ctx: CheckContext) -> None:
    """kill ends a process with everything it started, also what called setsid, and nothing else."""
    async with ctx.lease() as box:
        await box.exec("sleep 57 & echo $! > pid")
        n = ctx.unique_seconds()
        process = await box.spawn(f"setsid sleep {n}1 & (sleep {n}2 &); echo up; sleep {n}3")
        await ctx.until(lambda: _has(process, "up"))
        await process.kill()
        left = await box.exec(f"pgrep -f '^sleep {n}' | wc -l; {IS_ALIVE}")
    expect_equal(left.output.split(), ["0", "alive"], "processes left, and the one from before")


@check()
async def a_process_sees_the_state_of_the_slot(ctx: CheckContext) -> None:
    """A background process starts in the current directory with the exported variables."""
    async with ctx.lease() as box:
        await box.exec("mkdir sub && cd sub && export SEEN=1")
        process = await box.spawn("basename $PWD; echo $SEEN")
        await process.wait()
        chunk = await process.log(0)
    expect_equal(chunk.data, "sub\n1\n", "the log")


@check()
async def processes_are_listed(ctx: CheckContext) -> None:
    """The processes of a slot are listed, those of other slots are not."""
    async with ctx.two() as (one, other):
        process = await one.spawn("sleep 60")
        mine, theirs = await one.processes(), await other.processes()
        await process.kill()
    expect_equal((len(mine), len(theirs)), (1, 0), "processes listed for its own and for another slot")


@check("pgrep")
async def stop_processes_ends_everything(ctx: CheckContext) -> None:
    """All processes of the slot can be stopped while its files and state stay."""
    async with ctx.lease() as box:
        n = ctx.unique_seconds()
        await box.exec(f"sleep {n}1 & setsid sleep {n}2 & export KEPT=1; echo x > file")
        process = await box.spawn(f"sleep {n}3")
        await box.stop_processes()
        left = await box.exec(f"pgrep -f '^sleep {n}' | wc -l; cat file; echo $KEPT")
        expect(await process.poll() is not None, "the background process is said to run")
    expect_equal(left.output.split(), ["0", "x", "1"], "processes, file and variable")


@check()
async def writing_to_an_ended_process_is_an_error(ctx: CheckContext) -> None:
    """Writing to a process that ended is an error, not silence."""
    async with ctx.lease() as box:
        process = await box.spawn("true")
        await process.wait()
        with expect_error(SandboxError):
            await process.write("late\n")


async def _has(process: Process, text: str) -> bool:
    return text in (await process.log(0)).data
