"""The way through `Sandbox.exec`, with the unmodified SDK on the emulator: exact or lost, and no relay left behind."""

import ast
import asyncio
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from grpclib import Status

from sandbox_pool import SandboxLost
from sandbox_pool.client.host_client import HostClient
from sandbox_pool.providers.modal import modal_relay
from sandbox_pool.providers.modal.modal_exec import HIGH_WATER, relay_text
from sandbox_pool.providers.modal.modal_relay import MAX_BLOCK, Damaged, Packer, Unpacker
from support.modal_exec_host import QUICK, modal_host
from support.pool_wait import eventually, started

MB = 1 << 20
TESTS = Path(__file__).parents[3]


async def both_ways(box, size):
    """Bytes that are no text go there and come back."""
    data = os.urandom(size)
    await box.write_file("data", data)
    assert await box.read_file("data") == data


async def test_50_mb_go_both_ways_byte_for_byte_without_any_network():
    async with modal_host() as host, host.lease() as box:
        await both_ways(box, 50 * MB)


async def test_it_runs_and_ends_on_gvisor_the_kernel_of_modals_sandboxes():
    async with modal_host(replace(QUICK, silence_s=20.0), "gvisor") as host:
        async with host.lease() as box:
            await both_ways(box, 2 * MB)
        (sandbox,) = host.emulator.sandboxes
        await eventually(lambda: all(relay.done.is_set() for relay in sandbox.execs.values()))
        assert len(sandbox.execs) == 3


async def test_cuts_mid_stream_lose_nothing():
    async with modal_host() as host:
        faults = host.emulator.faults
        cuts = [faults.cut_output(size, times=None, probability=p) for size, p in ((1, 0.2), (4099, 0.2), (300_001, 1))]
        lost = faults.lose("TaskExecStdinWrite", times=None, probability=0.2)
        failed = faults.fail("TaskExecStdinWrite", times=None, probability=0.2)
        async with host.lease() as box:
            for number in range(30):
                assert (await box.exec(f"echo {number}")).output == f"{number}\n"
            await both_ways(box, 8 * MB)
        assert sum(cut.hits for cut in cuts) > 8 * MB // 300_001
        assert lost.hits
        assert failed.hits


async def test_a_cut_after_which_the_sdk_gives_up_is_resumed_where_it_was():
    async with modal_host() as host, host.lease() as box:
        cut = host.emulator.faults.cut_output(1_000_003)
        refused = [
            host.emulator.faults.fail(rpc, Status.UNAUTHENTICATED, times=times)
            for rpc, times in (("TaskExecStdioRead", 7), ("TaskExecStdinWrite", 5))
        ]
        # The stream that is open now is not cut: only the next one can be.
        await host.emulator.set_reach(host.sandbox.object_id, "refuses")
        await host.emulator.set_reach(host.sandbox.object_id, "well")
        await both_ways(box, 4 * MB)
        assert [fault.hits for fault in (cut, *refused)] == [1, 7, 5]


@pytest.mark.slow
async def test_an_outage_longer_than_the_sdks_own_patience_loses_nothing():
    async with modal_host(replace(QUICK, silence_s=60.0)) as host, host.lease() as box:
        going = asyncio.create_task(both_ways(box, 20 * MB))
        await asyncio.sleep(0.3)
        await host.emulator.set_reach(host.sandbox.object_id, "refuses")
        await asyncio.sleep(15)
        assert not going.done()
        await host.emulator.set_reach(host.sandbox.object_id, "well")
        await going


@pytest.mark.parametrize("reach", ["refuses", "hangs"])
async def test_a_cut_that_does_not_heal_is_sandbox_lost_in_bounded_time(reach):
    async with modal_host(replace(QUICK, close_s=0.5)) as host, host.lease() as box:
        pending = await started(box, "sleep 60")
        await host.emulator.set_reach(host.sandbox.object_id, reach)
        async with asyncio.timeout(QUICK.silence_s + 10):
            with pytest.raises(SandboxLost, match="the relay sent nothing for 2 s"):
                await pending
        with pytest.raises(SandboxLost):
            await box.exec("true")


async def test_the_end_of_the_sandbox_is_sandbox_lost():
    async with modal_host(replace(QUICK, silence_s=100.0)) as host, host.lease() as box:
        pending = await started(box, "sleep 60")
        await host.emulator.preempt(host.sandbox.object_id)
        async with asyncio.timeout(20):
            with pytest.raises(SandboxLost):
                await pending


async def test_a_relay_that_is_killed_is_sandbox_lost_and_can_be_dialled_again():
    async with modal_host() as host:
        async with host.lease() as box:
            pending = await started(box, "sleep 60")
            os.kill(host.relays()[0], signal.SIGKILL)
            with pytest.raises(SandboxLost, match="the relay ended with 137"):
                await pending
        client = await host.connect()
        assert [slot.state for slot in await client.slots()] == ["leased", "free"]


async def test_signs_of_life_keep_a_quiet_connection():
    async with modal_host(replace(QUICK, silence_s=3.0, orphan_s=3.0)) as host, host.lease() as box:
        assert (await box.exec("sleep 7; echo done")).output == "done\n"


async def test_an_event_loop_that_was_blocked_has_not_lost_its_relay():
    async with modal_host(replace(QUICK, silence_s=0.4)) as host, host.lease() as box:
        time.sleep(2)  # noqa: ASYNC251 - blocking is the point
        assert (await box.exec("echo still here")).output == "still here\n"


async def test_no_relay_is_left_after_close():
    async with modal_host() as host:
        async with host.lease() as box:
            await box.exec("true")
            assert len(host.relays()) == 1
        await eventually(lambda: not host.relays())


async def test_no_relay_is_left_when_the_path_is_closed_under_open_connections():
    async with modal_host() as host:
        clients = [await host.connect() for _ in range(3)]
        assert len(host.relays()) == 3
        await host.path.close()
        await eventually(lambda: not host.relays())
        assert all(client.closed for client in clients)


async def test_no_relay_is_left_by_an_event_loop_that_just_ends():
    async with modal_host() as host:
        await asyncio.to_thread(asyncio.run, _connect_and_leave(host))
        await eventually(lambda: not host.relays())


async def _connect_and_leave(host):
    await host.connect()


async def test_no_relay_is_left_by_a_client_that_dies_by_sigkill():
    async with modal_host() as host, host.lease() as box:
        before = set(host.relays())
        client = await asyncio.create_subprocess_exec(
            sys.executable,
            TESTS / "support" / "modal_exec_host.py",
            host.sandbox.object_id,
            "2.0",
            env={**os.environ, "PYTHONPATH": str(TESTS)},
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            client.stdin.write(host.token.encode() + b"\n")
            assert await client.stdout.readline() == b"connected\n"
            assert len(host.relays()) == 2
        finally:
            client.kill()
            await client.wait()
        await eventually(lambda: set(host.relays()) == before)
        assert (await box.exec("echo unharmed")).output == "unharmed\n"


@pytest.mark.parametrize("when", ["before_s", "after_s"])
async def test_no_relay_is_left_by_a_dial_that_was_cancelled(when):
    async with modal_host() as host:
        await eventually(lambda: not host.relays())
        starting = host.emulator.faults.delay("TaskExecStart", **{when: 0.5}, times=1)
        dialling = asyncio.create_task(host.connect())
        await eventually(lambda: starting.hits)
        dialling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialling
        await host.path.close()
        assert host.emulator.calls["TaskExecStart"] == 3
        await eventually(lambda: not host.relays())


async def test_an_exec_carries_no_secret_and_stays_far_below_the_limit_of_arguments():
    async with modal_host() as host, host.lease() as box:
        await box.write_file("large", b"x" * MB)
        await box.exec("true " + "x" * 200_000)
        execs = [request for rpc, request in host.emulator.requests if rpc == "TaskExecStart"]
        for request in execs:
            assert sum(map(len, request.command_args)) < 65536 // 4
            assert host.token not in str(request)
            assert 0 < request.timeout_secs <= 600


async def test_what_is_wrong_in_the_sandbox_is_said():
    async with modal_host() as host:
        with pytest.raises(SandboxLost, match=r"nothing listens at unix:/nowhere: .*No such file"):
            await host.connect(target="unix:/nowhere")
        with pytest.raises(SandboxLost, match="no-such-python"):
            await host.connect(python="no-such-python")
        with pytest.raises(SandboxLost, match="there is no sandbox for exec:other"):
            await HostClient.connect("exec:other", host.token, dial=host.path.dial)


async def test_words_on_stdout_that_are_not_the_relays_are_not_taken_for_data():
    async with modal_host() as host:
        script = '#!/bin/sh\necho Welcome to this image\nexec python3 "$@"\n'
        process = await host.sandbox.exec.aio("sh", "-c", 'printf %s "$1" > /tmp/p; chmod +x /tmp/p', "sh", script)
        assert await process.wait.aio() == 0
        with pytest.raises(SandboxLost, match="what follows the first 0 bytes is not a block"):
            await host.connect(python="/tmp/p")


async def test_a_writer_is_paused_while_nothing_moves_and_loses_nothing():
    echo = (
        "import socket, threading\n"
        "listener = socket.socket(socket.AF_UNIX); listener.bind('/tmp/echo'); listener.listen()\n"
        "peer, _ = listener.accept()\n"
        "while data := peer.recv(65536): peer.sendall(data)\n"
    )
    async with modal_host(replace(QUICK, silence_s=60.0)) as host:
        await host.sandbox.exec.aio("python3", "-c", echo, timeout=60)
        address = host.path.add("echo", replace(host.host, target="unix:/tmp/echo"))
        protocol = Recorder()
        transport = await host.path.dial(protocol, address)
        await host.emulator.set_reach(host.sandbox.object_id, "hangs")
        data = random.Random(0).randbytes(HIGH_WATER + 3 * MB)
        transport.write(data)
        assert protocol.events == ["pause"]
        await host.emulator.set_reach(host.sandbox.object_id, "well")
        await eventually(lambda: len(protocol.received) == len(data))
        assert protocol.received == data
        assert protocol.events == ["pause", "resume"]
        transport.write(b"the last words")
        transport.close()
        transport.write(b"come too late")
        await asyncio.wait_for(protocol.lost, 10)
        assert await protocol.lost is None


class Recorder(asyncio.Protocol):
    def __init__(self):
        self.received = bytearray()
        self.events = []
        self.lost = asyncio.get_running_loop().create_future()

    def data_received(self, data):
        self.received += data

    def pause_writing(self):
        self.events.append("pause")

    def resume_writing(self):
        self.events.append("resume")

    def connection_lost(self, error):
        self.lost.set_result(error)


def blocks(*sizes):
    packer, source = Packer(), random.Random(0)
    pieces = [source.randbytes(size) for size in sizes]
    return pieces, [packer.pack(piece) for piece in pieces]


@pytest.mark.parametrize("step", [1, 7, 65536])
def test_blocks_arrive_as_they_were_sent_however_they_are_cut(step):
    pieces, packed = blocks(0, 1, 1000, 0, MAX_BLOCK)
    stream, unpacker = b"".join(packed), Unpacker()
    arrived = [block for start in range(0, len(stream), step) for block in unpacker.feed(stream[start : start + step])]
    assert arrived == pieces


SPOILT = {
    "lost block": lambda b: [b[0], b[2]],
    "doubled block": lambda b: [b[0], b[1], b[1], b[2]],
    "swapped blocks": lambda b: [b[0], b[2], b[1]],
    "lost byte": lambda b: [b[0], b[1][:50] + b[1][51:], b[2]],
    "doubled bytes": lambda b: [b[0], b[1][:60] + b[1][50:], b[2]],
    "foreign bytes": lambda b: [b[0], b"Warning: something\n", b[1], b[2]],
    "changed byte": lambda b: [b[0], b[1][:-1] + bytes([b[1][-1] ^ 1]), b[2]],
}


@pytest.mark.parametrize("fault", SPOILT)
def test_a_stream_that_is_not_whole_is_found_before_anything_wrong_is_passed_on(fault):
    pieces, packed = blocks(100, 200, 300)
    unpacker, arrived = Unpacker(), []

    def receive():
        for part in SPOILT[fault](packed):
            arrived.extend(unpacker.feed(part))

    with pytest.raises(Damaged):
        receive()
    assert arrived == pieces[: len(arrived)]


def test_the_relay_is_one_program_for_python_3_9_with_the_standard_library_only():
    tree = ast.parse(relay_text(), feature_version=(3, 9))
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imported}
    assert names <= sys.stdlib_module_names
    assert Path(modal_relay.__file__).read_text() == relay_text()
