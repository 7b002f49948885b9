"""Commands in a sandbox through the SDK: their input and output, their ends, and cuts on the way."""

import asyncio
import hashlib
import os

import pytest
from modal import Sandbox
from modal.exception import (
    InvalidError,
    NotFoundError,
    SandboxFilesystemDirectoryNotEmptyError,
    SandboxFilesystemIsADirectoryError,
    SandboxFilesystemNotFoundError,
    ServiceError,
)
from modal.stream_type import StreamType

from emulators.modal.steps import shell
from support.pool_wait import eventually


@pytest.fixture
async def sandbox(app):
    return await Sandbox.create.aio(app=app)


async def test_how_a_command_ended_is_told(sandbox):
    assert await shell(sandbox, "echo out; echo err >&2; exit 3") == (3, "out\n", "err\n")
    assert (await shell(sandbox, "kill -9 $$"))[0] == 137
    process = await sandbox.exec.aio("sleep", "0.3")
    assert await process.poll.aio() is None
    await process.wait.aio()
    assert await process.poll.aio() == 0


async def test_output_is_whole_however_large_and_however_late_it_is_read(sandbox):
    process = await sandbox.exec.aio("bash", "-c", "head -c 20000000 /dev/zero; exit 5", text=False)
    assert await process.wait.aio() == 5
    assert await process.stdout.read.aio() == bytes(20_000_000)


async def test_a_discarded_stream_is_empty(sandbox):
    process = await sandbox.exec.aio("echo", "a", stdout=StreamType.DEVNULL, stderr=StreamType.DEVNULL)
    assert await process.wait.aio() == 0


async def test_a_child_that_holds_the_output_delays_its_end_but_not_the_commands(sandbox):
    process = await sandbox.exec.aio("bash", "-c", "(sleep 1; echo late) & echo early")
    assert await process.wait.aio() == 0
    assert await process.stdout.read.aio() == "early\nlate\n"


async def test_input_is_taken_whole(sandbox):
    data = os.urandom(5_000_000)
    process = await sandbox.exec.aio("md5sum")
    for start in range(0, len(data), 1_000_000):
        process.stdin.write(data[start : start + 1_000_000])
        await process.stdin.drain.aio()
    process.stdin.write_eof()
    await process.stdin.drain.aio()
    assert (await process.stdout.read.aio()).split()[0] == hashlib.md5(data).hexdigest()


async def test_arguments_beyond_the_sdks_limit_are_refused(sandbox):
    process = await sandbox.exec.aio("bash", "-c", "echo ${#0}", "x" * 65_000)
    assert await process.stdout.read.aio() == "65000\n"
    with pytest.raises(InvalidError):
        await sandbox.exec.aio("echo", "x" * 70_000)


async def test_a_timeout_ends_a_command_and_its_output(sandbox):
    process = await sandbox.exec.aio("bash", "-c", "echo a; sleep 55 & wait", timeout=1)
    assert await process.stdout.read.aio() == "a\n"
    assert await process.wait.aio() in (-1, 137)
    assert "sleep 55" not in (await shell(sandbox, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"))[1]


async def test_a_terminal_is_one(sandbox):
    process = await sandbox.exec.aio("bash", "-c", "test -t 1 && echo terminal", pty=True)
    assert await process.stdout.read.aio() == "terminal\r\n"


async def test_files_are_written_and_read(sandbox):
    files = sandbox.filesystem
    await files.write_text.aio("héllo", "/data/a/b.txt")
    assert await files.read_text.aio("/data/a/b.txt") == "héllo"
    assert (await shell(sandbox, "cat /data/a/b.txt"))[1] == "héllo"
    large = os.urandom(3_000_000)
    await files.write_bytes.aio(large, "/data/large")
    assert await files.read_bytes.aio("/data/large") == large
    assert [found.name for found in await files.list_files.aio("/data")] == ["a", "large"]
    with pytest.raises(SandboxFilesystemNotFoundError):
        await files.read_text.aio("/data/none")
    with pytest.raises(SandboxFilesystemIsADirectoryError):
        await files.read_text.aio("/data")
    with pytest.raises(SandboxFilesystemDirectoryNotEmptyError):
        await files.remove.aio("/data")
    await files.remove.aio("/data", recursive=True)


async def test_a_start_or_an_input_whose_answer_was_lost_is_done_once(emulator, sandbox):
    emulator.faults.lose("TaskExecStart", times=2)
    emulator.faults.lose("TaskExecStdinWrite", times=2)
    process = await sandbox.exec.aio("bash", "-c", "echo run >> /ran; cat")
    process.stdin.write(b"once\n")
    process.stdin.write_eof()
    await process.stdin.drain.aio()
    assert await process.stdout.read.aio() == "once\n"
    assert (await shell(sandbox, "cat /ran"))[1] == "run\n"


async def test_output_that_is_cut_is_read_on_where_it_was_cut(emulator, sandbox):
    cut = emulator.faults.cut_output(3, times=5)
    assert (await shell(sandbox, "echo 0123456789; sleep 0.2; echo abc"))[1] == "0123456789\nabc\n"
    assert cut.hits == 5


@pytest.mark.slow
async def test_output_that_stays_cut_is_an_error_and_can_be_read_on_later(emulator, sandbox):
    """Slow: the SDK tries for ten seconds."""
    read = []

    async def read_on(stream):
        async for chunk in stream:
            read.append(chunk)

    process = await sandbox.exec.aio("bash", "-c", "echo first; sleep 1; echo second")
    cut = emulator.faults.fail("TaskExecStdioRead", times=None)
    with pytest.raises(ServiceError):
        await read_on(process.stdout)
    emulator.faults.remove(cut)
    await read_on(process.stdout)
    assert "".join(read) == "first\nsecond\n"


async def test_commands_of_a_sandbox_that_dies_are_lost(emulator, sandbox):
    process = await sandbox.exec.aio("bash", "-c", "echo start; sleep 100")
    waiting = asyncio.ensure_future(process.wait.aio())
    await asyncio.sleep(0.2)
    await emulator.preempt(sandbox.object_id)
    for lost in (waiting, process.stdout.read.aio(), process.poll.aio(), sandbox.exec.aio("true")):
        with pytest.raises(NotFoundError):
            await lost
    assert await sandbox.poll.aio() is not None


async def test_a_command_on_a_worker_that_hangs_goes_on_when_it_is_reached_again(emulator, sandbox):
    process = await sandbox.exec.aio("bash", "-c", "sleep 0.3; echo done")
    await emulator.set_reach(sandbox.object_id, "hangs")
    reading = asyncio.ensure_future(process.stdout.read.aio())
    await asyncio.sleep(1)
    assert not reading.done()
    await emulator.set_reach(sandbox.object_id, "well")
    assert await reading == "done\n"


async def test_a_worker_that_refuses_is_a_service_error(emulator, sandbox):
    await shell(sandbox, "true")
    await emulator.set_reach(sandbox.object_id, "refuses")
    started = asyncio.ensure_future(sandbox.exec.aio("true"))
    await eventually(lambda: emulator.calls["TaskExecStart"] > 2)
    await emulator.set_reach(sandbox.object_id, "well")
    assert await (await started).wait.aio() == 0
