"""Tunnels into sandboxes: verified TLS, the same port in many sandboxes, cuts; and readiness."""

import asyncio
import ssl

import pytest
from modal import Probe, Sandbox
from modal.exception import ConflictError
from modal.exception import TimeoutError as ModalTimeoutError

from emulators.modal.steps import shell

ECHO = """
import asyncio, sys
async def serve(reader, writer):
    while line := await reader.readline():
        writer.write(sys.argv[1].encode() + b" " + line)
        await writer.drain()
    writer.close()
async def main():
    async with await asyncio.start_server(serve, sys.argv[2], 8000) as server:
        await server.serve_forever()
asyncio.run(main())
"""


async def echoing(app, word, host="0.0.0.0", **options):
    return await Sandbox.create.aio("python3", "-c", ECHO, word, host, app=app, **options)


async def connect(sandbox, port=8000):
    host, port = (await sandbox.tunnels.aio())[port].tls_socket
    return await asyncio.open_connection(host, port, ssl=ssl.create_default_context())


async def ask(reader, writer, line):
    writer.write(line + b"\n")
    return await asyncio.wait_for(reader.readline(), 10)


async def test_a_tunnel_leads_into_its_own_sandbox_over_verified_tls(app):
    options = {"encrypted_ports": [8000], "readiness_probe": Probe.with_tcp(8000)}
    sandboxes = [await echoing(app, word, **options) for word in ("one", "two")]
    for sandbox, word in zip(sandboxes, (b"one", b"two"), strict=True):
        await sandbox.wait_until_ready.aio(timeout=30)
        reader, writer = await connect(sandbox)
        assert await ask(reader, writer, b"hello") == word + b" hello\n"
        writer.close()


async def test_a_client_that_does_not_know_the_authority_refuses_it(app, monkeypatch):
    sandbox = await echoing(app, "x", encrypted_ports=[8000])
    monkeypatch.delenv("SSL_CERT_FILE")
    with pytest.raises(ssl.SSLCertVerificationError):
        await connect(sandbox)


async def test_an_unencrypted_port_is_plain(app):
    sandbox = await echoing(app, "x", unencrypted_ports=[8000], readiness_probe=Probe.with_tcp(8000))
    await sandbox.wait_until_ready.aio(timeout=30)
    reader, writer = await asyncio.open_connection(*(await sandbox.tunnels.aio())[8000].tcp_socket)
    assert await ask(reader, writer, b"hello") == b"x hello\n"
    writer.close()


async def test_a_server_that_listens_on_the_loopback_only_is_not_reached(app):
    probe = Probe.with_exec("bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000")
    sandbox = await echoing(app, "x", "127.0.0.1", encrypted_ports=[8000], readiness_probe=probe)
    await sandbox.wait_until_ready.aio(timeout=30)
    reader, _ = await connect(sandbox)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ssl.SSLError)):
        await reader.readexactly(1)


async def test_a_cut_breaks_connections_and_new_ones_are_taken(app, emulator):
    sandbox = await echoing(app, "x", encrypted_ports=[8000], readiness_probe=Probe.with_tcp(8000))
    await sandbox.wait_until_ready.aio(timeout=30)
    reader, writer = await connect(sandbox)
    assert await ask(reader, writer, b"1") == b"x 1\n"
    await emulator.cut_tunnels(sandbox.object_id)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ssl.SSLError)):
        await reader.readexactly(1)
    reader, writer = await connect(sandbox)
    assert await ask(reader, writer, b"2") == b"x 2\n"
    writer.close()


async def test_a_worker_that_hangs_holds_the_bytes_and_one_that_refuses_breaks_connections(app, emulator):
    sandbox = await echoing(app, "x", encrypted_ports=[8000], readiness_probe=Probe.with_tcp(8000))
    await sandbox.wait_until_ready.aio(timeout=30)
    reader, writer = await connect(sandbox)
    await emulator.set_reach(sandbox.object_id, "hangs")
    writer.write(b"1\n")
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting := asyncio.ensure_future(reader.readline())), 0.5)
    await emulator.set_reach(sandbox.object_id, "well")
    assert await waiting == b"x 1\n"
    await emulator.set_reach(sandbox.object_id, "refuses")
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ssl.SSLError)):
        await reader.readexactly(1)


async def test_tunnels_end_with_their_sandbox(app):
    sandbox = await echoing(app, "x", encrypted_ports=[8000], readiness_probe=Probe.with_tcp(8000))
    await sandbox.wait_until_ready.aio(timeout=30)
    reader, _ = await connect(sandbox)
    await sandbox.terminate.aio()
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError, ssl.SSLError)):
        await reader.readexactly(1)
    with pytest.raises(OSError):
        await connect(sandbox)


async def test_an_open_connection_keeps_a_sandbox_from_being_idle(app, emulator):
    probe = Probe.with_tcp(8000)
    sandbox = await echoing(app, "x", encrypted_ports=[8000], idle_timeout=4, readiness_probe=probe)
    await sandbox.wait_until_ready.aio(timeout=30)
    _, writer = await connect(sandbox)
    await asyncio.sleep(5)
    assert emulator.alive == [sandbox.object_id]
    writer.close()
    await sandbox.wait.aio()
    assert emulator.alive == []


async def test_readiness_by_a_command_is_waited_for_up_to_a_limit(app):
    sandbox = await Sandbox.create.aio(app=app, readiness_probe=Probe.with_exec("test", "-f", "/tmp/ready"))
    with pytest.raises(ModalTimeoutError):
        await sandbox.wait_until_ready.aio(timeout=1)
    await shell(sandbox, "touch /tmp/ready")
    await sandbox.wait_until_ready.aio(timeout=10)
    dying = await Sandbox.create.aio("sleep", "0.3", app=app, readiness_probe=Probe.with_exec("false"))
    with pytest.raises(ConflictError):
        await dying.wait_until_ready.aio(timeout=10)
