"""What persists between commands of one lease."""

from __future__ import annotations

import asyncio

from sandbox_pool.conformance.check import check, expect, expect_equal
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.spec import SandboxSpec

LOADER = "LD_LIBRARY_PATH=/no such 'place'\nTMPDIR=/tmp\n"


@check()
async def exported_variables_persist(ctx: CheckContext) -> None:
    """Exported variables are there in the next command, whatever their value."""
    async with ctx.lease() as box:
        await box.exec('export A="two\nlines \'and\' \\"quotes\\""')
        result = await box.exec('printf %s "$A"')
    expect_equal(result.output, "two\nlines 'and' \"quotes\"", "the variable")


@check()
async def unset_variables_stay_unset(ctx: CheckContext) -> None:
    """A variable that was unset is gone in the next command."""
    async with ctx.lease(SandboxSpec(env={"GIVEN": "1"})) as box:
        await box.exec("unset GIVEN")
        result = await box.exec('echo "${GIVEN-gone}"')
    expect_equal(result.output, "gone\n", "output")


@check()
async def the_working_directory_persists(ctx: CheckContext) -> None:
    """`cd` holds for the next command and is reported."""
    async with ctx.lease() as box:
        first = await box.exec("mkdir -p deep/er && cd deep/er")
        second = await box.exec("pwd")
    expect(first.cwd.endswith("/deep/er"), f"cwd is {first.cwd!r}")
    expect_equal(second.output.strip(), first.cwd, "the next working directory")


@check()
async def functions_and_aliases_persist(ctx: CheckContext) -> None:
    """Functions and aliases that were defined work in the next command."""
    async with ctx.lease() as box:
        await box.exec("greet() { echo \"hello $1\"; }; alias shout='echo LOUD'")
        function = await box.exec("greet you")
        alias = await box.exec("shopt -s expand_aliases\nshout")
    expect_equal((function.output, alias.output), ("hello you\n", "LOUD\n"))


@check()
async def the_shell_itself_persists(ctx: CheckContext) -> None:
    """Variables that are not exported, arrays, options and jobs are there in the next command."""
    async with ctx.lease() as box:
        await box.exec("own=1; list=(a 'b c'); set -o pipefail; shopt -s extglob; sleep 60 &")
        result = await box.exec('echo "$own ${list[1]}"; [[ -o pipefail ]] && shopt -q extglob && jobs -r | wc -l')
    expect_equal(result.output.split(), ["1", "b", "c", "1"], "variables, and the number of jobs")


@check()
async def a_shell_that_ends_is_followed_by_one_like_it(ctx: CheckContext) -> None:
    """After `exit`, a signal or a timeout the next command finds what the last command that ended by itself left."""
    async with ctx.lease() as box:
        await box.exec("own=1; greet() { echo hello; }; set -o pipefail")
        for end, timeout_s in (("own=2; exit 1", 30), ("own=3; kill -9 $$", 30), ("own=4; sleep 60", 0.5)):
            await box.exec(end, timeout_s=timeout_s)
        result = await box.exec("echo $own; greet; [[ -o pipefail ]] && echo on")
    expect_equal(result.output, "2\nhello\non\n", "output")


@check()
async def a_failed_command_keeps_its_state(ctx: CheckContext) -> None:
    """State set before a failing end of the same command persists."""
    async with ctx.lease() as box:
        await box.exec("export KEPT=1; exit 9")
        result = await box.exec("echo $KEPT")
    expect_equal(result.output, "1\n", "output")


@check()
async def env_of_one_call_does_not_stay(ctx: CheckContext) -> None:
    """`env` given to one call is not there in the next."""
    async with ctx.lease() as box:
        await box.exec("true", env={"PASSING": "1"})
        result = await box.exec('echo "${PASSING-no}"')
    expect_equal(result.output, "no\n", "output")


@check()
async def concurrent_commands_do_not_mix_their_state(ctx: CheckContext) -> None:
    """Commands that run at the same time never corrupt each other's environment."""
    async with ctx.lease() as box:
        await asyncio.gather(*(box.exec(f"export V{n}={'x' * 500}; sleep 0.05") for n in range(8)))
        result = await box.exec("echo ok; echo $PATH; env | grep -c '^V[0-9]=x*$'")
    lines = result.output.splitlines()
    expect_equal(lines[0], "ok", "first line")
    expect("/bin" in lines[1], f"PATH is {lines[1]!r}")


@check()
async def a_removed_working_directory_is_reported(ctx: CheckContext) -> None:
    """When the working directory was removed the next command says 126, and `cd` elsewhere helps."""
    async with ctx.lease() as box:
        await box.exec("mkdir gone && cd gone && rmdir ../gone")
        lost = await box.exec("echo hi")
        found = await box.exec("echo hi", cwd="/")
    expect(lost.exit_code in (0, 126), f"exit code is {lost.exit_code}")
    expect_equal(found.output, "hi\n", "output with a directory given")


@check()
async def variables_of_the_loader_are_there(ctx: CheckContext) -> None:
    """Variables that a C library drops where it is careful, such as TMPDIR, reach commands and processes too."""
    async with ctx.lease(SandboxSpec(env={"TMPDIR": "/tmp", "LD_LIBRARY_PATH": "/no such 'place'"})) as box:
        expect_equal((await box.exec("env | grep -e ^TMPDIR= -e ^LD_LIB | sort")).output, LOADER, "of a command")
        process = await box.spawn("env | grep -e ^TMPDIR= -e ^LD_LIB | sort > of_a_process")
        await process.wait()
        expect_equal(await box.read_file("of_a_process"), LOADER.encode(), "of a process")


@check()
async def the_spec_environment_is_there(ctx: CheckContext) -> None:
    """Variables of the spec are in every command."""
    async with ctx.lease(SandboxSpec(env={"FROM_SPEC": "a=b 'c'"})) as box:
        first = await box.exec('echo "$FROM_SPEC"')
        second = await box.exec('echo "$FROM_SPEC"')
    expect_equal((first.output, second.output), ("a=b 'c'\n",) * 2)


@check()
async def the_spec_files_are_there(ctx: CheckContext) -> None:
    """Files of the spec are in the workspace when the lease begins, folders made."""
    async with ctx.lease(SandboxSpec(files={"a.txt": b"A", "deep/b.bin": b"\x00\xff"})) as box:
        result = await box.exec("cat a.txt; od -An -tx1 deep/b.bin")
    expect_equal(result.output, "A 00 ff\n", "output")


@check()
async def the_workspace_is_where_commands_start(ctx: CheckContext) -> None:
    """The first command runs in the workspace, which is empty and writable."""
    async with ctx.lease() as box:
        result = await box.exec("pwd; ls -A; touch x && echo writable")
    lines = result.output.splitlines()
    expect_equal(lines[-1], "writable", "last line")
    expect_equal(len(lines), 2, f"lines (the workspace is not empty: {lines})")


@check()
async def a_huge_environment(ctx: CheckContext) -> None:
    """A large environment persists without breaking later commands."""
    async with ctx.lease() as box:
        await box.exec('for i in $(seq 200); do export "BIG_$i=$(printf %0200d $i)"; done')
        result = await box.exec("env | grep -c ^BIG_")
    expect_equal(result.output, "200\n", "variables that persisted")
