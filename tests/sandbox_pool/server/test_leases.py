"""Leases, resets, snapshots, bridges and the protocol around them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from sandbox_pool.client.host_client import HostClient
from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.errors import ProtocolError, SandboxError, SandboxLost, StaleLease
from sandbox_pool.server.serving import wire
from sandbox_pool.spec import SandboxSpec
from support.pool_wait import eventually, started
from support.slot_server import Server, names_below, running_server

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_reset_slot_has_nothing_of_the_last_task(server: Server) -> None:
    client, spec = server.client, SandboxSpec()
    sandbox = await client.lease(0, task_id="a", spec=spec)
    await sandbox.exec(
        "echo s > secret; echo s > /tmp/s; echo s >> /etc/passwd; mkdir /new; export S=1; setsid sleep 61 &"
    )
    report = await client.release(0, sandbox.epoch)
    assert (report.clean, report.problems) == (True, ())
    other = await client.lease(0, task_id="b", spec=spec)
    found = await other.exec("ls -A . /tmp /new; grep -c ^s /etc/passwd; echo ${S-}; pgrep sleep; pwd")
    assert found.output.splitlines() == [
        "ls: cannot access '/new': No such file or directory",
        ".:",
        "",
        "/tmp:",
        (await other.exec("grep -c ^s /etc/passwd")).output.strip(),
        "",
        "/workspace",
    ]
    await client.release(0, other.epoch)


async def test_a_stale_holder_is_refused_everything(server: Server) -> None:
    client, spec = server.client, SandboxSpec()
    old = await client.lease(0, task_id="a", spec=spec)
    await client.release(0, old.epoch)
    again = await client.lease(0, task_id="b", spec=spec)
    assert again.epoch > old.epoch
    for call in (old.exec("true"), old.read_file("f"), old.write_file("f", b""), old.spawn("true"), old.snapshot()):
        with pytest.raises(StaleLease):
            await call
    with pytest.raises(StaleLease):
        await client.release(0, old.epoch)
    assert (await client.release(0, again.epoch)).clean


async def test_a_leased_slot_is_not_leased_again(server: Server, sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="not free"):
        await server.client.lease(sandbox.slot, task_id="x", spec=SandboxSpec())
    with pytest.raises(SandboxError, match="no slot 99"):
        await server.client.lease(99, task_id="x", spec=SandboxSpec())


async def test_files_and_environment_of_the_spec(server: Server) -> None:
    spec = SandboxSpec(
        env={"GREETING": "hello 'you'"}, files={"a/b": b"\x00\xff", "/opt/c": b"c"}, workdir="/home/me/work"
    )
    async with server.lease(spec) as sandbox:
        result = await sandbox.exec("echo $GREETING; pwd; wc -c < a/b; cat /opt/c")
        assert result.output == "hello 'you'\n/home/me/work\n2\nc"
    async with server.lease(SandboxSpec()) as sandbox:
        assert (await sandbox.exec("echo ${GREETING-}; ls /opt/c")).exit_code == 2


async def test_a_shell_that_waited_has_no_variable_of_the_lease_before(server: Server) -> None:
    """A free slot may have one waiting, made for a lease like the last one."""
    for env in ({"A": "1", "HOME": "/opt"}, {"A": "1", "HOME": "/opt"}, {"B": "2"}, {}):
        sandbox = await server.client.lease(0, task_id="x", spec=SandboxSpec(env=env))
        seen = (await sandbox.exec("echo ${A-} ${B-} $HOME")).output.split()
        assert seen == [*(env[name] for name in ("A", "B") if name in env), env.get("HOME", "/root")]
        assert (await server.client.release(0, sandbox.epoch)).clean
        await eventually(lambda: names_below(server.process.pid).count("slot-keeper"))


async def test_a_slot_whose_next_life_cannot_be_built_is_never_leased_again() -> None:
    async with running_server(slots=2) as server:
        sandbox = await server.client.lease(0, task_id="x", spec=SandboxSpec())
        place = server.directory / "scratch/run/m"
        place.rmdir()
        assert (await server.client.release(0, sandbox.epoch)).clean

        async def state() -> bool:
            return (await server.client.slots())[0].state == "quarantined"

        await eventually(state)
        place.mkdir()
        with pytest.raises(SandboxError, match="quarantined, not free"):
            await server.client.lease(0, task_id="x", spec=SandboxSpec())
        other = await server.client.lease(1, task_id="x", spec=SandboxSpec())
        assert (await other.exec("echo 1")).output == "1\n"


async def test_slots_and_health_tell_the_truth(server: Server, sandbox: Sandbox) -> None:
    states = {state.slot: state for state in await server.client.slots()}
    assert states[sandbox.slot].state == "leased"
    assert states[sandbox.slot].task_id == sandbox.task_id
    health = await server.client.health()
    assert health.states == {"leased": 1, "free": 3}
    assert 0 < health.scratch_free_mb <= health.scratch_total_mb


async def test_a_fork_starts_from_the_files_and_state_of_the_snapshot(server: Server, sandbox: Sandbox) -> None:
    await sandbox.exec("echo base > f; chmod 600 f; ln -s f l")
    await sandbox.exec("mkdir sub; cd sub; export A=1; sleep 62 &")
    snapshot = await sandbox.snapshot(keep_state=True)
    await sandbox.exec("echo later > ../f")
    async with server.lease(snapshot=snapshot) as one, server.lease(snapshot=snapshot) as two:
        await one.exec("echo one > ../f")
        seen = await two.exec("cat ../l; pwd; echo $A; stat -c '%a %u' ../f; pgrep sleep")
        assert seen.output.splitlines() == ["base", "/workspace/sub", "1", "600 0"]
        deeper = await one.snapshot(keep_state=True)
        async with server.lease(snapshot=deeper) as three:
            assert (await three.exec("cat ../f")).output == "one\n"
        await server.client.drop_snapshot(deeper)
    await server.client.drop_snapshot(snapshot)
    with pytest.raises(SandboxError, match="no snapshot"):
        await server.client.lease(3, task_id="x", spec=SandboxSpec(), snapshot=snapshot)


async def test_a_slot_is_clean_after_a_fork(server: Server, sandbox: Sandbox) -> None:
    await sandbox.exec("echo x > f")
    snapshot = await sandbox.snapshot()
    async with server.lease(snapshot=snapshot) as fork:
        used = fork.slot
    clean = await server.client.lease(used, task_id="x", spec=SandboxSpec())
    assert (await clean.exec("ls -A")).output == ""
    await server.client.release(used, clean.epoch)


async def test_a_snapshot_moves_to_another_host(server: Server, sandbox: Sandbox) -> None:
    await sandbox.write_file("big", bytes(3_000_000) + b"end")
    await sandbox.exec("export A=moved; mkdir full; echo 1 > full/f")
    async with server.lease(snapshot=await sandbox.snapshot(keep_state=True)) as fork:
        await fork.exec("rm -r full; mkdir full")
        snapshot = await fork.snapshot(keep_state=True)
    async with running_server(slots=1) as elsewhere:
        copy = await elsewhere.client.import_snapshot(server.client.export_snapshot(snapshot))
        async with elsewhere.lease(snapshot=copy) as fork:
            assert (await fork.exec("tail -c 3 big; wc -c < big; echo $A; ls full")).output == "end3000003\nmoved\n"


async def test_what_was_removed_from_the_root_is_not_in_forks_and_owners_are_kept(
    server: Server, sandbox: Sandbox
) -> None:
    if server.client.info.variant == "rootless":
        pytest.skip("an ordinary user may not change files of the host's root, not even in a layer of its own")
    await sandbox.exec("rm -r /etc/hostname /etc/apt; mkdir /etc/apt; ln -s f l; chown -h 5:6 l")
    snapshot = await sandbox.snapshot()
    async with running_server(slots=1) as elsewhere:
        copy = await elsewhere.client.import_snapshot(server.client.export_snapshot(snapshot))
        for place, name in ((server, snapshot), (elsewhere, copy)):
            async with place.lease(snapshot=name) as fork:
                assert (await fork.exec("ls /etc/apt /etc/hostname; stat -c %u l")).output.splitlines() == [
                    "ls: cannot access '/etc/hostname': No such file or directory",
                    "/etc/apt:",
                    "5",
                ]


async def test_programs_in_the_slot_call_out_through_a_bridge(sandbox: Sandbox) -> None:
    async def handler(line: bytes) -> bytes:
        number = json.loads(line)["n"]
        await asyncio.sleep(0.2 if number == 0 else 0)
        return json.dumps({"double": number * 2}).encode()

    program = (
        "import json,socket,sys\ns=socket.socket(socket.AF_UNIX);s.connect('/run/b.sock');f=s.makefile('rw')\n"
        "for n in range(int(sys.argv[1])): f.write(json.dumps({'n':n})+'\\n')\n"
        "f.flush()\nprint(sorted(json.loads(f.readline())['double'] for _ in range(int(sys.argv[1]))))\n"
    )
    await sandbox.write_file("call.py", program)
    async with sandbox.serve("/run/b.sock", handler):
        results = await asyncio.gather(*(sandbox.exec("python3 call.py 4") for _ in range(3)))
        assert [result.output for result in results] == ["[0, 2, 4, 6]\n"] * 3
    assert await sandbox.stat("/run/b.sock") is None
    async with sandbox.serve("/run/b.sock", handler):
        assert (await sandbox.exec("python3 call.py 1")).output == "[0]\n"


ASK_FOR_SIZES = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect("/run/b.sock")
f = s.makefile("rwb")
for size in sys.argv[1:]:
    f.write(size.encode() + b"\\n")
    f.flush()
    line = f.readline()
    print(len(line) - 1, line.rstrip() == (b"%08x" % int(size)) * (int(size) // 8))
"""


async def test_answers_of_a_bridge_may_be_larger_than_a_frame(sandbox: Sandbox) -> None:
    async def handler(line: bytes) -> bytes:
        return (b"%08x" % int(line)) * (int(line) // 8)

    sizes = [8, wire.CHUNK - 16, wire.CHUNK - 8, wire.CHUNK, 3 * wire.CHUNK + 8, 5 << 20, 16]
    async with sandbox.serve("/run/b.sock", handler):
        await sandbox.write_file("ask.py", ASK_FOR_SIZES.encode())
        asked = await sandbox.exec(f"python3 ask.py {' '.join(map(str, sizes))}", timeout_s=30)
    assert asked.output == "".join(f"{size} True\n" for size in sizes)


ASK_EACH = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.connect("/run/b.sock")
f = s.makefile("rw")
for word in sys.argv[1:]:
    f.write(word + "\\n")
    f.flush()
    print(f.readline(), end="")
"""


async def test_a_program_whose_call_fails_outside_the_slot_is_told_at_once(sandbox: Sandbox) -> None:
    async def handler(line: bytes) -> bytes:
        if line == b"raise":
            raise ValueError("/root/secret")
        if line == b"cancel":
            raise asyncio.CancelledError
        return line

    async with sandbox.serve("/run/b.sock", handler):
        await sandbox.write_file("ask.py", ASK_EACH.encode())
        asked = await sandbox.exec("python3 ask.py one raise cancel two", timeout_s=30)
    assert not asked.timed_out
    one, raised, cancelled, two = asked.output.splitlines()
    assert (one, two) == ("one", "two")
    assert json.loads(raised) == {"error": "the call failed outside the sandbox: ValueError"}
    assert json.loads(cancelled) == {"error": "the call was cancelled"}


async def test_a_bridge_that_cannot_be_opened_says_why(sandbox: Sandbox) -> None:
    async def handler(line: bytes) -> bytes:
        return line

    with pytest.raises(SandboxError, match="Not a directory"):
        async with sandbox.serve("/etc/passwd/sock", handler):
            pass


async def test_a_wrong_token_is_refused(server: Server) -> None:
    with pytest.raises(ProtocolError, match="token"):
        await HostClient.connect(server.address, "wrong")


async def test_another_protocol_version_is_refused(server: Server) -> None:
    reader, writer = await asyncio.open_unix_connection(server.address.removeprefix("unix:"))
    writer.write(wire.encode({"i": 1, "op": "hello", "protocol": 999, "token": server.token}))
    ((header, _),) = wire.Decoder().feed(await reader.read(65536))
    assert header["err"]["kind"] == "protocol"
    assert await reader.read() == b""
    writer.close()


async def test_garbage_ends_the_connection_and_nothing_else(server: Server, sandbox: Sandbox) -> None:
    reader, writer = await asyncio.open_unix_connection(server.address.removeprefix("unix:"))
    writer.write(b"GET / HTTP/1.1\r\n\r\n" * 100)
    await reader.read()
    writer.close()
    assert (await sandbox.exec("echo ok")).output == "ok\n"


async def test_an_unknown_operation_is_refused(server: Server) -> None:
    with pytest.raises(ProtocolError, match="unknown operation"):
        await server.client._ask("frobnicate")


async def test_an_outcome_can_be_asked_for_over_another_connection(server: Server, sandbox: Sandbox) -> None:
    first = await server.connect()
    mine = first.sandbox(sandbox.slot, sandbox.epoch, task_id="t", spec=sandbox.spec)
    call = asyncio.create_task(mine.exec("echo started >> log; sleep 0.5; echo done", request_id="r"))
    while await sandbox.stat("log") is None:  # noqa: ASYNC110 - the slot cannot tell
        await asyncio.sleep(0.02)
    first.connection._transport.abort()  # type: ignore[union-attr]
    with pytest.raises(SandboxLost):
        await call
    second = await server.connect()
    again = second.sandbox(sandbox.slot, sandbox.epoch, task_id="t", spec=sandbox.spec)
    assert (await again.exec("echo started >> log; sleep 0.5; echo done", request_id="r")).output == "done\n"
    assert await sandbox.read_file("log") == b"started\n"
    await second.close()


async def test_a_lost_server_fails_every_pending_call_and_tells_once() -> None:
    async with running_server(slots=1) as doomed:
        lost: list[Exception] = []
        doomed.client.on_lost(lost.append)
        sandbox = await doomed.client.lease(0, task_id="t", spec=SandboxSpec())
        calls = [await started(sandbox, "sleep 60") for _ in range(3)]
        doomed.process.kill()
        for call in calls:
            with pytest.raises(SandboxLost):
                await call
        assert len(lost) == 1
        assert doomed.client.closed
        with pytest.raises(SandboxLost):
            await sandbox.exec("true")


async def test_shutdown_ends_the_server_and_cleans_its_scratch() -> None:
    async with running_server(slots=2) as ending:
        await ending.client.lease(0, task_id="t", spec=SandboxSpec())
        await ending.client.shutdown()
        assert await asyncio.wait_for(ending.process.wait(), 20) == 0
        assert list((ending.directory / "scratch").iterdir()) == []


async def test_the_server_ends_when_its_owner_stays_away() -> None:
    async with running_server("--owner-ttl-s", "0.3", slots=1) as orphan:
        await asyncio.sleep(0.6)
        assert orphan.process.returncode is None
        await orphan.client.close()
        assert await asyncio.wait_for(orphan.process.wait(), 20) == 0


async def test_the_server_listens_on_tcp_too() -> None:
    async with running_server(slots=1, listen="tcp:127.0.0.1:0") as remote, remote.lease() as sandbox:
        assert remote.address.startswith("tcp:127.0.0.1:")
        assert (await sandbox.exec("echo over tcp")).output == "over tcp\n"


async def test_an_image_is_a_directory_with_a_root(server: Server, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="not a folder"):
        await server.client.lease(0, task_id="t", spec=SandboxSpec(image="debian:12"))
    assert {state.state for state in await server.client.slots()} == {"free"}
