"""Background processes and terminals."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from sandbox_pool.client.process import Process
from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.errors import SandboxError
from support.pool_wait import eventually, eventually_prints
from support.slot_server import Server, pids_below

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def until(process: Process, text: str) -> str:
    """The log once it holds `text`."""

    async def has_it() -> str | None:
        data = (await process.log()).data
        return data if text in data else None

    return await eventually(has_it)


async def test_a_process_reads_its_stdin_and_ends_with_its_code(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("while read line; do echo got $line; done; exit 5")
    assert await process.poll() is None
    await process.write("one\n")
    await until(process, "got one")
    await process.write(b"two\n")
    await process.close_stdin()
    assert await process.wait(20) == 5
    assert await process.poll() == 5
    assert (await process.log()).data == "got one\ngot two\n"


def keepers_at_work(server: Server) -> list[int]:
    """Those that do not wait for anything."""
    return [
        pid
        for pid, name in pids_below(server.process.pid)
        if name == "slot-keeper" and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S"
    ]


async def test_what_has_ended_costs_nothing(server: Server, sandbox: Sandbox) -> None:
    """Its keeper stays, for its log and for what it left behind."""
    ended, left = await sandbox.spawn("echo ended"), await sandbox.spawn("sleep 60 & exit 0")
    assert [await ended.wait(20), await left.wait(20)] == [0, 0]
    assert (await sandbox.exec("sleep 60 >/dev/null & kill -9 $$")).exit_code == 137
    await eventually(lambda: not keepers_at_work(server), timeout_s=20)
    assert (await ended.log()).data == "ended\n"


async def test_wait_tells_the_end_at_once_and_gives_up_in_time(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("read line")
    assert await process.wait(0.05) is None
    waiting = asyncio.create_task(process.wait())
    await process.write("end\n")
    assert await asyncio.wait_for(waiting, 60) == 0


async def test_it_starts_from_the_state_of_the_slot_and_leaves_none(sandbox: Sandbox) -> None:
    await sandbox.exec("cd /etc; export A=1; f() { echo f $A $PWD; }")
    process = await sandbox.spawn("f; cd /usr; export A=2")
    assert await process.wait(20) == 0
    assert (await process.log()).data == "f 1 /etc\n"
    assert (await sandbox.exec("echo $A $PWD")).output == "1 /etc\n"
    other = await sandbox.spawn("echo $B $PWD", cwd="/usr", env={"B": "b"})
    await other.wait(20)
    assert (await other.log()).data == "b /usr\n"


async def test_the_log_is_read_by_offset(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("printf 0123456789")
    await process.wait(20)
    chunk = await process.log(offset=4, limit=3)
    assert (chunk.data, chunk.offset, chunk.next_offset, chunk.dropped) == ("456", 4, 7, 0)
    assert (await process.log(offset=99)).data == ""


async def test_a_flood_rolls_out_of_the_log_and_is_counted(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("seq 1 200000")
    assert await process.wait(30) == 0
    chunk = await process.log()
    total = sum(len(f"{i}\n") for i in range(1, 200001))
    assert chunk.next_offset == total
    assert chunk.dropped == chunk.offset == total - len(chunk.data)
    assert chunk.data.endswith("199999\n200000\n")


async def test_kill_takes_everything_it_started(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("setsid sleep 51 & sleep 51 & wait")
    other = await sandbox.spawn("sleep 52")
    await eventually_prints(sandbox, "pgrep -c -f '^sleep 51'", "2\n")
    await process.kill()
    assert await process.poll() == 137
    assert (await sandbox.exec("pgrep -f 'sleep 51' | wc -l")).output == "0\n"
    assert await other.poll() is None


async def test_signals_reach_it(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.05; done")
    await until(process, "ready")
    await process.signal(signal.SIGTERM)
    assert await process.wait(20) == 3
    assert "caught" in (await process.log()).data


async def test_a_terminal_is_a_terminal(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("tty; stty size; read -p 'name? ' name; echo hello $name; stty size", pty=True)
    await until(process, "name? ")
    await process.resize(50, 100)
    await process.write("you\n")
    assert await process.wait(20) == 0
    data = (await process.log()).data
    assert "/dev/pts/" in data
    assert "30 120" in data
    assert "hello you" in data
    assert "50 100" in data


async def test_an_interactive_program_works_on_a_terminal(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("python3 -q", pty=True)
    await until(process, ">>>")
    await process.write("6 * 7\n")
    await until(process, "42")
    await process.write("\x03")
    await until(process, "KeyboardInterrupt")
    await process.close_stdin()
    assert await process.wait(20) == 0


async def test_processes_are_listed(sandbox: Sandbox) -> None:
    first, second = await sandbox.spawn("sleep 53"), await sandbox.spawn("true")
    await second.wait(20)
    found = {process.id: await process.poll() for process in await sandbox.processes()}
    assert found == {first.id: None, second.id: 0}


async def test_a_process_of_another_slot_is_out_of_reach(server: Server, sandbox: Sandbox) -> None:
    process = await sandbox.spawn("sleep 54")
    async with server.lease() as other:
        stranger = Process(other._connection, other._header, process.id, process.pid)
        with pytest.raises(SandboxError, match="no process"):
            await stranger.kill()
    assert await process.poll() is None


async def test_writing_to_an_ended_process_is_refused(sandbox: Sandbox) -> None:
    process = await sandbox.spawn("true")
    await process.wait(20)
    with pytest.raises(SandboxError, match="ended"):
        await process.write("x")


async def test_stop_processes_ends_all_and_keeps_files(sandbox: Sandbox) -> None:
    await sandbox.exec("echo kept > f; sleep 55 & setsid sleep 55 &")
    process = await sandbox.spawn("sleep 55")
    call = asyncio.create_task(sandbox.exec("sleep 55"))
    await eventually_prints(sandbox, "pgrep -c -x sleep", "4\n")
    assert await sandbox.stop_processes() >= 4
    assert (await call).exit_code == 137
    assert await process.wait(20) == 137
    assert (await sandbox.exec("pgrep sleep; cat f")).output == "kept\n"


async def test_a_long_command_reports_that_it_is_alive(sandbox: Sandbox) -> None:
    seen: list[float] = []
    header = sandbox._header("exec", max_chars=100, alive_ms=200)
    await sandbox._connection.call(header, b"sleep 0.7", on_event=lambda event, _: seen.append(event["s"]))
    assert len(seen) >= 2
    assert seen == sorted(seen)
