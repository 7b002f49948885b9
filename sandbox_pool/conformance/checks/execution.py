"""Running one command."""

from __future__ import annotations

import asyncio
import time

from sandbox_pool.conformance.check import IS_ALIVE, check, expect, expect_equal
from sandbox_pool.conformance.context import CheckContext


@check()
async def output_and_exit_code(ctx: CheckContext) -> None:
    """A command's output and exit code come back."""
    async with ctx.lease() as box:
        result = await box.exec("echo hi; exit 3")
    expect_equal((result.output, result.exit_code, result.timed_out), ("hi\n", 3, False))


@check()
async def it_is_bash(ctx: CheckContext) -> None:
    """The shell is bash, with arrays and process substitution."""
    async with ctx.lease() as box:
        result = await box.exec('a=(x y); echo "${a[1]}"; cat <(echo sub); echo "${BASH_VERSION%%.*}"')
    expect(result.output.startswith("y\nsub\n"), f"output was {result.output!r}")
    expect(result.output.splitlines()[-1].isdigit(), "BASH_VERSION is empty")


@check()
async def pipelines_and_quotes(ctx: CheckContext) -> None:
    """Pipelines, quotes, heredocs and newlines reach the shell untouched."""
    command = "cat <<'EOF' | tr a-z A-Z\nit's \"quoted\" $HOME `no` \\n\nEOF\n"
    async with ctx.lease() as box:
        result = await box.exec(command)
    expect_equal(result.output, 'IT\'S "QUOTED" $HOME `NO` \\N\n', "output")


@check()
async def a_leading_newline_is_the_commands_own(ctx: CheckContext) -> None:
    """Nothing is added to the output: no newline, no marker, no prompt."""
    async with ctx.lease() as box:
        result = await box.exec("printf '\\nx'")
        silent = await box.exec("true")
    expect_equal((result.output, silent.output), ("\nx", ""), "output")


@check()
async def a_signal_shows(ctx: CheckContext) -> None:
    """A command that dies of a signal shows 128 + n and the signal."""
    async with ctx.lease() as box:
        result = await box.exec("kill -TERM $$")
    expect_equal((result.exit_code, result.signal), (143, 15), "exit code and signal")


@check()
async def a_childs_signal_is_an_exit_code(ctx: CheckContext) -> None:
    """A child that dies of a signal is 128 + n, as bash reports it."""
    async with ctx.lease() as box:
        result = await box.exec("bash -c 'kill -KILL $$'; echo $?")
    expect(result.output.rstrip().endswith("137"), f"output was {result.output!r}")


@check()
async def command_not_found_is_127(ctx: CheckContext) -> None:
    """A missing program is exit code 127 with bash's message."""
    async with ctx.lease() as box:
        result = await box.exec("no_such_program_here")
    expect_equal(result.exit_code, 127, "exit code")
    expect("not found" in result.output, f"output was {result.output!r}")


@check()
async def a_syntax_error_is_2(ctx: CheckContext) -> None:
    """A syntax error ends that command with 2, and the slot goes on."""
    async with ctx.lease() as box:
        broken = await box.exec('echo "unterminated')
        after = await box.exec("echo fine")
    expect_equal(broken.exit_code, 2, "exit code")
    expect_equal(after.output, "fine\n", "output of the next command")


@check()
async def stdin_is_passed(ctx: CheckContext) -> None:
    """What is given as stdin arrives byte for byte, without an extra newline."""
    async with ctx.lease() as box:
        result = await box.exec("od -An -c | tr -d ' \\n'", stdin=b"a\nb")
    expect_equal(result.output, "a\\nb", "stdin as the command saw it")


@check()
async def stdin_is_empty_by_default(ctx: CheckContext) -> None:
    """Without stdin a command that reads gets end of file, not a hang."""
    async with ctx.lease() as box:
        result = await box.exec("cat; echo done", timeout_s=20)
    expect_equal((result.output, result.exit_code), ("done\n", 0))


@check()
async def large_stdin(ctx: CheckContext) -> None:
    """A megabyte of stdin arrives whole."""
    async with ctx.lease() as box:
        result = await box.exec("wc -c", stdin=b"x" * 2**20)
    expect_equal(result.output.strip(), str(2**20), "bytes read")


@check()
async def a_reader_that_stops_early(ctx: CheckContext) -> None:
    """A command that does not read its stdin to the end is not an error."""
    async with ctx.lease() as box:
        result = await box.exec("head -c 1", stdin=b"x" * 2**20)
    expect_equal((result.output, result.exit_code), ("x", 0))


@check()
async def concurrent_commands_in_one_slot(ctx: CheckContext) -> None:
    """Commands in one slot run at the same time, each with its own output."""
    waiting = "until [ $(ls here | wc -l) = 6 ]; do sleep 0.05; done"  # each for all the others
    async with ctx.lease() as box:
        await box.exec("mkdir here")
        commands = [f"touch here/{n}; {waiting}; echo {n}" for n in range(6)]
        results = await asyncio.gather(*(box.exec(command, timeout_s=30) for command in commands))
    expect_equal([result.output for result in results], [f"{n}\n" for n in range(6)], "outputs")


@check()
async def a_child_holding_stdout_does_not_hold_the_call(ctx: CheckContext) -> None:
    """A background child that keeps stdout open does not delay the result."""
    async with ctx.lease() as box:
        began_s = time.monotonic()
        result = await box.exec("sleep 30 & echo started", timeout_s=25)
        took_s = time.monotonic() - began_s
    expect_equal(result.output, "started\n", "output")
    expect(took_s < 10, f"the call took {took_s:.1f} s")


@check()
async def and_list_in_the_background(ctx: CheckContext) -> None:
    """`A && server &` returns at once."""
    async with ctx.lease() as box:
        began_s = time.monotonic()
        result = await box.exec("true && sleep 30 &", timeout_s=25)
        took_s = time.monotonic() - began_s
    expect_equal((result.exit_code, result.timed_out), (0, False))
    expect(took_s < 10, f"the call took {took_s:.1f} s")


@check("signals-between-commands")
async def a_command_can_end_what_an_earlier_one_left(ctx: CheckContext) -> None:
    """What a command left running in the background can be signalled by the next command."""
    async with ctx.lease() as box:
        await box.exec("sleep 300 & echo $! > pid")
        ended = await box.exec(f'kill "$(cat pid)"; sleep 0.2; {IS_ALIVE} || echo ended')
    expect_equal(ended.output, "ended\n", "the process")


@check()
async def background_processes_survive_the_call(ctx: CheckContext) -> None:
    """What a command left running in the background is there for the next command."""
    async with ctx.lease() as box:
        await box.exec("sleep 60 & echo $! > pid")
        result = await box.exec(IS_ALIVE)
    expect_equal(result.output, "alive\n", "output")


@check()
async def exit_ends_only_the_command(ctx: CheckContext) -> None:
    """`exit` and `exec` end that command, not the slot."""
    async with ctx.lease() as box:
        first = await box.exec("exit 7")
        second = await box.exec("exec true")
        third = await box.exec("echo here")
    expect_equal((first.exit_code, second.exit_code, third.output), (7, 0, "here\n"))


@check()
async def set_e_ends_only_the_command(ctx: CheckContext) -> None:
    """`set -e` with a failing command ends that command with its code."""
    async with ctx.lease() as box:
        first = await box.exec("set -e; false; echo never")
        second = await box.exec("echo on")
    expect_equal((first.exit_code, first.output), (1, ""))
    expect_equal(second.output, "on\n", "output of the next command")


@check()
async def extra_environment_for_one_command(ctx: CheckContext) -> None:
    """`env` given to one call is there for that call."""
    async with ctx.lease() as box:
        result = await box.exec('echo "$ONLY_NOW"', env={"ONLY_NOW": "a b $c"})
    expect_equal(result.output, "a b $c\n", "output")


@check()
async def the_working_directory_of_one_call(ctx: CheckContext) -> None:
    """`cwd` given to one call is where it runs."""
    async with ctx.lease() as box:
        await box.exec("mkdir -p sub/dir")
        result = await box.exec("basename $PWD", cwd="sub/dir")
    expect_equal(result.output, "dir\n", "output")


@check()
async def a_bad_working_directory_is_126(ctx: CheckContext) -> None:
    """A directory that does not exist is exit code 126 and nothing runs."""
    async with ctx.lease() as box:
        result = await box.exec("touch ran; echo ran", cwd="/no/such/place")
        after = await box.exec("ls")
    expect_equal(result.exit_code, 126, "exit code")
    expect("ran" not in after.output, "the command ran all the same")


@check()
async def a_long_command_text(ctx: CheckContext) -> None:
    """A command text of 300 kB runs."""
    text = "x=" + "a" * 300_000 + "; echo ${#x}"
    async with ctx.lease() as box:
        result = await box.exec(text)
    expect_equal(result.output, "300000\n", "output")


@check()
async def duration_is_reported(ctx: CheckContext) -> None:
    """The duration of a command is measured."""
    async with ctx.lease() as box:
        result = await box.exec("sleep 0.3")
    expect(0.25 <= result.duration_s < 20, f"duration_s is {result.duration_s}")
