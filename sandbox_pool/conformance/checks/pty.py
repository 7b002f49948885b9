"""Interactive programs on a terminal."""

from __future__ import annotations

from sandbox_pool.client.process import Process
from sandbox_pool.conformance.check import check, expect, expect_equal
from sandbox_pool.conformance.context import CheckContext


@check()
async def a_terminal_is_there(ctx: CheckContext) -> None:
    """With pty=True the program has a terminal; without it has none."""
    async with ctx.lease() as box:
        with_pty = await box.spawn("test -t 0 -a -t 1 && echo terminal || echo none", pty=True)
        without = await box.spawn("test -t 0 -o -t 1 && echo terminal || echo none")
        await with_pty.wait()
        await without.wait()
        outputs = ((await with_pty.log(0)).data.strip(), (await without.log(0)).data.strip())
    expect_equal(outputs, ("terminal", "none"))


@check()
async def an_interactive_program_can_be_talked_to(ctx: CheckContext) -> None:
    """An interpreter on a terminal takes input and answers."""
    async with ctx.lease() as box:
        process = await box.spawn("bash --norc -i", pty=True)
        await process.write("echo $((6 * 7))\n")
        await ctx.until(lambda: _has(process, "42"))
        await process.write("exit 3\n")
        code = await process.wait(timeout_s=20)
    expect_equal(code, 3, "exit code")


@check()
async def control_c_interrupts(ctx: CheckContext) -> None:
    """Control-C on the terminal interrupts the program in front."""
    async with ctx.lease() as box:
        process = await box.spawn("echo go; sleep 60; echo after $?", pty=True)
        await ctx.until(lambda: _has(process, "go"))
        await process.write("\x03")
        code = await process.wait(timeout_s=20)
    expect(code is not None and code != 0, f"exit code is {code}")


@check()
async def the_size_can_be_changed(ctx: CheckContext) -> None:
    """The size of the terminal can be changed while the program runs."""
    async with ctx.lease() as box:
        process = await box.spawn("echo go; read -r line; stty size", pty=True)
        await ctx.until(lambda: _has(process, "go"))
        await process.resize(33, 101)
        await process.write("\n")
        await process.wait(timeout_s=20)
        log = (await process.log(0)).data
    expect("33 101" in log, f"the log is {log!r}")


@check("controlling-terminal")
async def password_prompts_work(ctx: CheckContext) -> None:
    """A program that reads from /dev/tty gets what is written."""
    async with ctx.lease() as box:
        process = await box.spawn("read -rs -p 'secret: ' s < /dev/tty; echo; echo got ${#s}", pty=True)
        await ctx.until(lambda: _has(process, "secret:"))
        await process.write("12345\n")
        await process.wait(timeout_s=20)
        log = (await process.log(0)).data
    expect("got 5" in log, f"the log is {log!r}")


async def _has(process: Process, text: str) -> bool:
    return text in (await process.log(0)).data
