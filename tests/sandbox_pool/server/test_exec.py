"""Exec semantics, in a real slot of a real server."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_pool.client.sandbox import Sandbox
from support.pool_wait import eventually_prints
from support.slot_server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")


def counting(marker: str) -> str:
    """A command that prints how many processes with this argument run in the slot."""
    read = "$({ tr '\\0' ' ' <$f; } 2>/dev/null)"
    return f"n=0; for f in /proc/[0-9]*/cmdline; do [[ {read} == *' {marker} ' ]] && ((n++)); done; echo $n"


async def alive(sandbox: Sandbox, marker: str) -> int:
    return int((await sandbox.exec(counting(marker))).output)


async def becomes_alive(sandbox: Sandbox, marker: str, processes: int = 1) -> None:
    await eventually_prints(sandbox, counting(marker), f"{processes}\n")


async def test_exit_code_and_output(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo out; echo err >&2; exit 7")
    assert (result.exit_code, result.output, result.signal, result.timed_out) == (7, "out\nerr\n", None, False)


async def test_environment_directory_functions_and_aliases_persist(sandbox: Sandbox) -> None:
    await sandbox.exec("export A=$'x\\n\"y' ; B=own; cd /etc; f() { echo f-$1; }; export -f f; alias hi='echo aliased'")
    result = await sandbox.exec('echo "$A|${B-unset}|$PWD"; f 1; bash -c "f 2"; hi')
    assert result.output == 'x\n"y|own|/etc\nf-1\nf-2\naliased\n'
    assert result.cwd == "/etc"


async def test_an_unset_variable_stays_unset(sandbox: Sandbox) -> None:
    await sandbox.exec("unset LC_CTYPE; export PATH=/bin")
    assert (await sandbox.exec('echo "${LC_CTYPE-none} $PATH"')).output == "none /bin\n"


async def test_cd_dash_works_across_commands(sandbox: Sandbox) -> None:
    await sandbox.exec("cd /usr")
    await sandbox.exec("cd /etc")
    assert (await sandbox.exec("cd - >/dev/null; pwd")).cwd == "/usr"


async def test_state_is_kept_after_exit_and_beside_an_own_trap(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("cd /usr; export X=1; exit 3")).cwd == "/usr"
    assert (await sandbox.exec("trap 'echo bye' EXIT; export Y=2; cd /etc")).output == "bye\n"
    assert (await sandbox.exec("echo $X$Y $PWD")).output == "12 /etc\n"


async def test_env_of_one_command_does_not_persist(sandbox: Sandbox) -> None:
    await sandbox.exec("export KEEP=old")
    first = await sandbox.exec("echo $ONCE $KEEP; export NEW=1", env={"ONCE": "a 'b'", "KEEP": "new"})
    assert first.output == "a 'b' new\n"
    assert (await sandbox.exec("echo ${ONCE-none} $KEEP $NEW")).output == "none old 1\n"
    gone = await sandbox.exec("cd ..; bash -c 'echo $ONCE'; exit 3", cwd="/usr/bin", env={"ONCE": "b"}, stdin="")
    assert (gone.output, gone.exit_code, gone.cwd) == ("b\n", 3, "/usr")
    assert (await sandbox.exec("echo ${ONCE-none} $KEEP $NEW $PWD")).output == "none old 1 /usr\n"


async def test_an_impossible_variable_name_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(Exception, match="environment variable"):
        await sandbox.exec("true", env={"A;rm": "x"})


async def test_a_bad_directory_is_126_and_leaves_the_state(sandbox: Sandbox) -> None:
    result = await sandbox.exec("echo ran", cwd="/no/such/dir")
    assert result.exit_code == 126
    assert "ran" not in result.output
    assert "No such file or directory" in result.output


async def test_a_removed_working_directory_does_not_lock_the_sandbox(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir gone; cd gone; rm -r ../gone")
    result = await sandbox.exec("pwd")
    assert (result.exit_code, result.output) == (0, "/workspace\n")


async def test_a_directory_that_was_replaced_is_the_new_one(sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir d; cd d; touch old")
    await sandbox.exec("cd ..; rm -r d; mkdir d; touch d/new; cd d")
    assert (await sandbox.exec("ls")).output == "new\n"


async def test_stdin_is_passed_and_otherwise_empty(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 1000
    result = await sandbox.exec("sha256sum; cat", stdin=data)
    assert result.output.startswith(__import__("hashlib").sha256(data).hexdigest())
    assert (await sandbox.exec("cat; echo end")).output == "end\n"


async def test_output_streams_are_merged_in_order_and_separate_on_request(sandbox: Sandbox) -> None:
    command = "for i in 1 2 3; do echo o$i; echo e$i >&2; done"
    assert (await sandbox.exec(command)).output == "o1\ne1\no2\ne2\no3\ne3\n"
    apart = await sandbox.exec(command, merge_stderr=False)
    assert (apart.output, apart.stderr) == ("o1\no2\no3\n", "e1\ne2\ne3\n")


async def test_reopening_stderr_keeps_what_was_printed(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("echo a; echo b > /dev/stderr; echo c > /dev/stdout")).output == "a\nb\nc\n"


async def test_a_child_that_holds_stdout_does_not_delay_the_result(sandbox: Sandbox) -> None:
    result = await sandbox.exec("sleep 630 & setsid sleep 631 & echo started", timeout_s=60)
    assert (result.output, result.timed_out) == ("started\n", False)
    await becomes_alive(sandbox, "630")
    await becomes_alive(sandbox, "631")


async def test_a_compound_background_command_returns(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("true && sleep 32 & echo on", timeout_s=20)).output == "on\n"
    await becomes_alive(sandbox, "32")


async def test_background_output_does_not_block_the_process(sandbox: Sandbox) -> None:
    await sandbox.exec("(head -c 2000000 /dev/zero; touch written) & ")
    await eventually_prints(sandbox, "ls written", "written\n")


async def test_timeout_kills_the_whole_tree_and_nothing_else(sandbox: Sandbox) -> None:
    await sandbox.exec("sleep 40 &")
    await becomes_alive(sandbox, "40")
    command = "echo before; (setsid sleep 41 &); (env -i setsid bash -c 'sleep 41 & sleep 41' &) ; sleep 41"
    result = await sandbox.exec(command, timeout_s=3)
    assert (result.exit_code, result.timed_out, result.output) == (124, True, "before\n")
    assert await alive(sandbox, "41") == 0
    assert await alive(sandbox, "40") == 1


async def test_timeout_ends_what_ignores_signals(sandbox: Sandbox) -> None:
    result = await sandbox.exec("trap '' TERM INT HUP; while :; do :; done", timeout_s=0.3)
    assert result.exit_code == 124
    assert (await sandbox.exec("echo ok")).output == "ok\n"


async def test_cancelling_the_call_kills_the_command(sandbox: Sandbox) -> None:
    call = asyncio.create_task(sandbox.exec("setsid sleep 42 & sleep 42"))
    await becomes_alive(sandbox, "42", processes=2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await alive(sandbox, "42") == 0


async def test_signal_that_ended_the_shell_is_reported(sandbox: Sandbox) -> None:
    result = await sandbox.exec("kill -9 $$")
    assert (result.exit_code, result.signal) == (137, 9)
    assert (await sandbox.exec("sh -c 'kill -15 $$'")).exit_code == 143


async def test_a_command_that_stops_its_own_shell_ends_it(sandbox: Sandbox) -> None:
    """Nobody is there to let it go on."""
    result = await sandbox.exec("echo here; kill -STOP $$; echo there", timeout_s=60)
    assert (result.output, result.exit_code, result.timed_out) == ("here\n", 137, False)
    stop = "until [ -e go ]; do sleep 0.02; done; kill -STOP $$"
    assert (await sandbox.exec(f"({stop}) >/dev/null 2>&1 & echo one")).output == "one\n"
    assert (await sandbox.exec("touch go; sleep 60", timeout_s=50)).exit_code == 137
    assert (await sandbox.exec("echo two", timeout_s=60)).output == "two\n"


async def test_commands_run_side_by_side_in_one_slot(sandbox: Sandbox) -> None:
    meet = "touch here.{0}; until [ $(ls here.* | wc -l) = 8 ]; do sleep 0.05; done; echo {0}"
    calls = [sandbox.exec(meet.format(number), timeout_s=60) for number in range(8)]
    assert [result.output for result in await asyncio.gather(*calls)] == [f"{number}\n" for number in range(8)]


async def test_output_beyond_the_cap_keeps_head_and_tail_and_the_whole_log(sandbox: Sandbox) -> None:
    result = await sandbox.exec("seq 1 20000", max_output_chars=1000)
    whole = "".join(f"{i}\n" for i in range(1, 20001))
    assert result.truncation is not None
    assert result.truncation.total_chars == len(whole)
    assert result.truncation.omitted_chars == len(whole) - 1000
    assert result.output.startswith(whole[:400])
    assert result.output.endswith(whole[-600:])
    assert await sandbox.read_file(result.truncation.log_path) == whole.encode()


async def test_output_at_the_cap_is_whole(sandbox: Sandbox) -> None:
    result = await sandbox.exec("printf é%.0s {1..500}", max_output_chars=500)
    assert (result.output, result.truncation) == ("é" * 500, None)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.binary(max_size=300), cap=st.integers(1, 60))
async def test_any_bytes_are_decoded_and_counted_as_python_does(server: Server, data: bytes, cap: int) -> None:
    text = data.decode("utf-8", "replace")
    async with server.lease() as sandbox:
        result = await sandbox.exec("cat", stdin=data, max_output_chars=cap)
    if len(text) <= cap:
        assert (result.output, result.truncation) == (text, None)
        return
    assert result.truncation is not None
    assert result.truncation.total_chars == len(text)
    assert result.output.startswith(text[: cap * 2 // 5])


async def test_nothing_printed_can_pass_for_status_or_state(sandbox: Sandbox) -> None:
    result = await sandbox.exec("printf 'exit\\0status=0\\0\\0'; printf '/etc\\0/etc\\0declare -x PWNED=1\\n'; exit 9")
    assert (result.exit_code, result.cwd) == (9, "/workspace")
    assert (await sandbox.exec("echo ${PWNED-no}")).output == "no\n"


async def test_the_shell_is_not_disturbed_by_odd_commands(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("echo 'unterminated")).exit_code == 2
    assert (await sandbox.exec("cat <<EOF\n$((1+1)) it's\nEOF")).output == "2 it's\n"
    assert (await sandbox.exec("exec 3>&- 9>&-; set -euo pipefail; false; echo no")).exit_code == 1
    assert (await sandbox.exec("# only a comment")).exit_code == 0
    assert (await sandbox.exec("")).exit_code == 0
    assert (await sandbox.exec("nosuchcommand")).output == "bash: line 1: nosuchcommand: command not found\n"


async def test_a_very_long_command_runs(sandbox: Sandbox) -> None:
    text = "x" * 2_000_000
    assert (await sandbox.exec(f"v='{text}'; echo ${{#v}}")).output == "2000000\n"


async def test_the_shell_stays(sandbox: Sandbox) -> None:
    """With all that a shell has: its process, variables, options, jobs, open files, its mask."""
    first = await sandbox.exec(
        "echo $$ $BASHPID; own=1; list=(a 'b c'); declare -A map=([k]=v); set -o pipefail; shopt -s extglob; umask 027;"
        " exec 7>seven; trap 'echo caught' USR1; sleep 600 & sleep 601 &"
    )
    second = await sandbox.exec(
        'echo $$; echo "$own ${list[1]} ${map[k]}"; [[ -o pipefail ]] && echo 1; shopt -q extglob && umask;'
        " echo to >&7; cat seven; kill -USR1 $$; jobs | wc -l; kill $! %1; wait; jobs -r | wc -l"
    )
    mine, real = first.output.split()
    assert mine == real
    assert second.output == f"{mine}\n1 b c v\n1\n0027\nto\ncaught\n2\n0\n"


ENDS = {
    "exit": ("exit 5", 5),
    "exec": ("exec true", 0),
    "kill": ("kill -9 $$", 137),
    "errexit": ("set -e; false", 1),
    "unset": ("set -u; echo $nothing", 127),
    "noexec": ("set -n", 0),
    "own trap": ("trap 'true' EXIT", 0),
    "timeout": ("sleep 60", 124),
}


@pytest.mark.parametrize("how", ENDS)
async def test_the_next_shell_has_the_state_of_the_one_that_ended(sandbox: Sandbox, how: str) -> None:
    command, code = ENDS[how]
    await sandbox.exec(
        "own=1; list=(a 'b c'); f() { echo \"f $1\"; }; alias hi='echo aliased'; set -o pipefail; shopt -s extglob;"
        " umask 027; readonly fixed=2; trap 'echo caught' USR1; mkdir -p d; cd d; sleep 602 & "
    )
    assert (await sandbox.exec(command, timeout_s=1 if how == "timeout" else 60)).exit_code == code
    after = await sandbox.exec(
        'echo "$own ${list[1]} $fixed"; f 1; hi; [[ -o pipefail ]] && echo 1; shopt -q extglob && umask;'
        " kill -USR1 $$; basename $PWD"
    )
    assert after.output == "1 b c 2\nf 1\naliased\n1\n0027\ncaught\nd\n"
    assert await alive(sandbox, "602") == 1


async def test_options_for_one_command_do_not_stay(sandbox: Sandbox) -> None:
    await sandbox.exec("set -evx")
    assert (await sandbox.exec("false; echo on")).output == "on\n"


async def test_output_of_what_was_left_running_is_not_that_of_a_later_command(sandbox: Sandbox) -> None:
    """However many there are, and also when their shell has no pipe left for another."""
    for number in range(9):
        await sandbox.exec(
            f"own=$((own + 1)); (until [ -e go ]; do sleep 0.02; done; echo late; touch done.{number}) &"
        )
        assert (await sandbox.exec("echo here")).output == "here\n"
    waited = await sandbox.exec("touch go; until [ $(ls | grep -c done) = 9 ]; do sleep 0.02; done; echo mine $own")
    assert waited.output == "mine 9\n"


async def test_a_session_goes_on_beside_a_command_that_runs(sandbox: Sandbox) -> None:
    """What the commands beside it leave is there for those after them; the one that ends last leaves its own."""
    long = asyncio.create_task(sandbox.exec("A=long; touch began; until [ -e go ]; do sleep 0.02; done"))
    await eventually_prints(sandbox, "ls began", "began\n")
    await sandbox.exec("A=beside; B=2")
    assert (await sandbox.exec("echo $A $B")).output == "beside 2\n"
    await sandbox.write_file("go", b"")
    await long
    assert (await sandbox.exec("echo $A $B")).output == "long\n"


async def test_the_same_request_id_runs_nothing_twice(sandbox: Sandbox) -> None:
    first = await sandbox.exec("echo x >> twice; wc -l < twice", request_id="once")
    again = await sandbox.exec("echo x >> twice; wc -l < twice", request_id="once")
    assert first == again
    assert (await sandbox.read_file("twice")) == b"x\n"


async def test_a_running_request_asked_for_again_gives_its_outcome(sandbox: Sandbox) -> None:
    command = "sleep 0.5; echo x >> shared; cat shared"
    results = await asyncio.gather(*(sandbox.exec(command, request_id="shared") for _ in range(3)))
    assert [result.output for result in results] == ["x\n"] * 3
