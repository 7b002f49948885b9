"""Lines: commands that go to a slot's shell without passing the server, and the server's right to have it back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.errors import SandboxLost
from sandbox_pool.server.slots.channel import PACKET
from support.pool_wait import eventually, started
from support.slot_server import Server, names_below, running_server

pytestmark = pytest.mark.asyncio(loop_scope="module")


@contextlib.contextmanager
def frozen(server: Server) -> Iterator[None]:
    """Whatever works meanwhile does not need the server."""
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


async def works_alone(server: Server, sandbox: Sandbox) -> bool:
    """Whether the next command takes the line."""
    with frozen(server):
        running = asyncio.ensure_future(sandbox.exec("true"))
        done, _ = await asyncio.wait([running], timeout=0.2)
    await running
    return bool(done)


async def has_line(server: Server, sandbox: Sandbox) -> None:
    await eventually(lambda: works_alone(server, sandbox))


async def test_commands_need_no_server_once_they_have_a_line(server: Server, sandbox: Sandbox) -> None:
    await has_line(server, sandbox)
    with frozen(server):
        result = await sandbox.exec("cd /tmp; x=1; echo out; echo err >&2; exit_code() { return 3; }; exit_code")
        assert (result.exit_code, result.output, result.cwd) == (3, "out\nerr\n", "/tmp")
        apart = await sandbox.exec("echo out; echo err >&2", merge_stderr=False, env={"A": "1"}, stdin=b"in")
        assert (apart.output, apart.stderr, apart.cwd) == ("out\n", "err\n", "/tmp")
        cut = await sandbox.exec("seq 100000", max_output_chars=100)
        assert cut.truncation is not None
        assert (await sandbox.exec(f"tail -n1 {cut.truncation.log_path}; pwd; echo $x")).output == "100000\n/tmp\n1\n"
        assert (await sandbox.exec("sleep 60", timeout_s=0.1)).timed_out


async def test_what_goes_on_from_a_command_on_the_line_knows_its_state(server: Server, sandbox: Sandbox) -> None:
    await has_line(server, sandbox)
    await sandbox.exec("cd /opt; x=kept")
    process = await sandbox.spawn("echo $x $PWD")
    assert await process.wait() == 0
    assert (await process.log()).data == "kept /opt\n"
    await has_line(server, sandbox)
    await sandbox.exec("cd /usr; x=later")
    snapshot = await sandbox.snapshot(keep_state=True)
    async with server.lease(snapshot=snapshot) as fork:
        assert (await fork.exec("echo $x $PWD")).output == "later /usr\n"
    await server.client.drop_snapshot(snapshot)
    await has_line(server, sandbox)
    await sandbox.forget_state()
    assert (await sandbox.exec("echo ${x-none} $PWD")).output == "none /workspace\n"


async def test_a_line_is_lent_in_a_folder_whose_name_is_not_utf8(server: Server, sandbox: Sandbox) -> None:
    await sandbox.exec("mkdir $'\\xff'; cd $'\\xff'")
    through_the_server = await sandbox.exec("true #" + "x" * PACKET)
    assert (through_the_server.exit_code, through_the_server.cwd[-2:]) == (0, "/\ufffd")
    await has_line(server, sandbox)
    assert (await sandbox.exec("pwd | od -An -tx1 | tail -c 7")).output.split() == ["ff", "0a"]


async def test_another_connection_goes_on_in_the_same_shell(server: Server, sandbox: Sandbox) -> None:
    await has_line(server, sandbox)
    await sandbox.exec("x=$BASHPID")
    other = await server.connect()
    try:
        same = other.sandbox(sandbox.slot, sandbox.epoch, task_id=sandbox.task_id, spec=sandbox.spec)
        assert (await same.exec("y=2; [ $x = $BASHPID ] && echo same")).output == "same\n"
        assert (await sandbox.exec("[ $x = $BASHPID ] && echo $y")).output == "2\n"
    finally:
        await other.close()
    assert (await sandbox.exec("[ $x = $BASHPID ] && echo $y")).output == "2\n"
    await has_line(server, sandbox)


async def test_the_session_is_that_of_the_command_that_ended_last(server: Server, sandbox: Sandbox) -> None:
    await has_line(server, sandbox)
    await sandbox.exec("x=before")
    slow = await started(sandbox, "until [ -e go ]; do sleep 0.01; done; x=slow")
    assert (await sandbox.exec("echo $x; x=quick")).output == "before\n"
    assert (await sandbox.exec("echo $x")).output == "quick\n"
    await sandbox.write_file("go", b"")
    await slow
    assert (await sandbox.exec("echo $x")).output == "slow\n"


async def test_a_command_beside_the_line_that_ends_last_is_the_session(server: Server, sandbox: Sandbox) -> None:
    slow = asyncio.ensure_future(
        sandbox.exec("touch began; until [ -e go ]; do sleep 0.01; done; x=slow", request_id="through the server")
    )
    await eventually(lambda: sandbox.stat("began"))
    await has_line(server, sandbox)
    assert (await sandbox.exec("x=quick; echo $x")).output == "quick\n"
    await sandbox.write_file("go", b"")
    await slow
    assert (await sandbox.exec("echo $x")).output == "slow\n"


async def test_a_cancelled_command_on_the_line_leaves_the_session(server: Server, sandbox: Sandbox) -> None:
    await sandbox.exec("x=1")
    running = await started(sandbox, "x=2; echo part; exec sleep 60")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await sandbox.exec("echo $x; pgrep -c sleep")).output == "1\n0\n"
    await has_line(server, sandbox)


async def test_a_command_that_kills_its_keeper_is_told_as_killed(server: Server, sandbox: Sandbox) -> None:
    await has_line(server, sandbox)
    await sandbox.exec("x=kept")
    result = await sandbox.exec("x=lost; kill -9 $PPID; sleep 60")
    assert (result.exit_code, result.signal) == (137, 9)
    assert (await sandbox.exec("echo $x")).output == "kept\n"
    await has_line(server, sandbox)


async def test_a_shell_that_ends_is_followed_by_one_with_its_state(server: Server, sandbox: Sandbox) -> None:
    for round_ in range(3):
        await has_line(server, sandbox)
        assert (await sandbox.exec(f"x={round_}; exit 5")).exit_code == 5
        assert (await sandbox.exec("echo $x")).output == f"{round_}\n"
    await has_line(server, sandbox)
    await sandbox.exec("(sleep 0.05; kill -9 $$) & x=9")  # while nobody waits for it
    await asyncio.sleep(0.1)
    assert (await sandbox.exec("echo $x")).output == "9\n"


async def test_a_lease_that_is_over_ends_the_command_on_its_line(server: Server) -> None:
    slot = next(state.slot for state in await server.client.slots() if state.state == "free")
    sandbox = await server.client.lease(slot, task_id="x", spec=server.spec)
    await has_line(server, sandbox)
    running = await started(sandbox, "sleep 60")
    other = await server.connect()
    try:
        assert (await other.release(slot, sandbox.epoch)).clean
    finally:
        await other.close()
    with pytest.raises(SandboxLost):
        await running
    with pytest.raises(SandboxLost):
        await sandbox.exec("true")


async def test_idle_time_counts_what_the_line_does(server: Server, sandbox: Sandbox) -> None:
    async def idle_s() -> float | None:
        return {state.slot: state for state in await server.client.slots()}[sandbox.slot].idle_s

    await has_line(server, sandbox)
    running = asyncio.ensure_future(sandbox.exec("until [ -e go ]; do sleep 0.01; done"))
    await eventually(lambda: _is_none(idle_s))
    await sandbox.write_file("go", b"")
    await running
    before_s = await eventually(idle_s)
    await asyncio.sleep(0.3)
    assert (await idle_s() or 0.0) > before_s


async def _is_none(ask) -> bool:
    return await ask() is None


async def test_a_server_that_passes_no_descriptors_is_asked_for_everything() -> None:
    async with running_server(listen="tcp:127.0.0.1:0") as server, server.lease() as sandbox:
        await sandbox.exec("x=1")
        assert not await works_alone(server, sandbox)
        assert (await sandbox.exec("echo $x")).output == "1\n"


async def test_shells_that_nobody_uses_are_put_to_rest_and_go_on_from_their_state() -> None:
    async with running_server("--most-shells", "1", slots=3) as server:
        boxes = [await server.client.lease(n, task_id="x", spec=server.spec) for n in range(3)]
        for box in boxes:
            await box.exec("x=$BASHPID; f() { echo kept; }; cd /tmp")
        holding = await boxes[1].exec("exec 7</etc/passwd; echo $BASHPID")
        await eventually(lambda: names_below(server.process.pid).count("bash") == 2)
        went_on = await boxes[0].exec("[ $x != $BASHPID ] && f; pwd")
        assert went_on.output == "kept\n/tmp\n"
        assert (await boxes[1].exec("echo $BASHPID; head -c4 <&7")).output == f"{holding.output}root"


async def test_a_shell_that_waits_for_long_is_put_to_rest_and_goes_on_from_its_state() -> None:
    async with running_server("--rest-after-s", "0.2", slots=2) as server:
        boxes = [await server.client.lease(n, task_id="x", spec=server.spec) for n in range(2)]
        words = "set -- 'one two' \"it's\"; set() { false; }; IFS=,; set -u; x=$BASHPID"
        await boxes[0].exec(f"cd /opt; pushd /usr; pushd /tmp; {words}")
        await eventually(lambda: names_below(server.process.pid).count("bash") == 0)
        went_on = await boxes[0].exec('[ $x != $BASHPID ] && printf \'%s\\n\' $# "$1" "$2"; pwd; popd; popd; pwd')
        assert went_on.output == "2\none two\nit's\n/tmp\n/usr /opt\n/opt\n/opt\n"
        assert (await boxes[1].exec("echo used for the first time")).exit_code == 0


@pytest.mark.parametrize("kept", ["exec 7</etc/passwd", "ulimit -S -t 99", "renice 5 $$", "sleep 60 &"])
async def test_a_shell_that_holds_more_than_a_state_is_not_put_to_rest(kept) -> None:
    async with running_server("--rest-after-s", "0.2", slots=2) as server:
        boxes = [await server.client.lease(n, task_id="x", spec=server.spec) for n in range(2)]
        holding = await boxes[0].exec(f"{{ {kept}\n}} >/dev/null 2>&1; echo $BASHPID")
        await boxes[1].exec("true")
        await eventually(lambda: names_below(server.process.pid).count("bash") == 1)
        assert (await boxes[0].exec("echo $BASHPID")).output == holding.output
