"""Sandboxes under gVisor's runsc, the kernel Modal runs. Slow; needs tests/live/containers/prepare.sh."""

import asyncio
import ssl

import pytest
from modal import Probe, Sandbox
from modal.exception import NotFoundError

from emulators.modal.steps import shell
from support.pool_wait import eventually

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("emulator", ["gvisor"], indirect=True)]


async def test_the_kernel_is_gvisors_and_commands_run_in_it(app):
    sandbox = await Sandbox.create.aio(app=app, env={"A": "1"}, workdir="/new/place")
    assert (await shell(sandbox, "dmesg"))[1].count("gVisor") == 1
    assert await shell(sandbox, "echo $A$B; pwd; exit 3", env={"B": "2"}) == (3, "12\n/new/place\n", "")
    process = await sandbox.exec.aio("md5sum")
    process.stdin.write(b"abc")
    process.stdin.write_eof()
    await process.stdin.drain.aio()
    assert (await process.stdout.read.aio()).split()[0] == "900150983cd24fb0d6963f7d28e17f72"
    terminal = await sandbox.exec.aio("bash", "-c", "test -t 1 && echo terminal", pty=True)
    assert await terminal.stdout.read.aio() == "terminal\r\n"
    await sandbox.filesystem.write_text.aio("héllo", "/data/b.txt")
    assert await sandbox.filesystem.read_text.aio("/data/b.txt") == "héllo"


async def test_the_command_of_a_sandbox_ends_it(app):
    sandbox = await Sandbox.create.aio("bash", "-c", "echo out; exit 4", app=app)
    assert await sandbox.stdout.read.aio() == "out\n"
    await sandbox.wait.aio()
    assert sandbox.returncode == 4


async def test_a_timeout_ends_a_command_inside(app):
    sandbox = await Sandbox.create.aio(app=app)
    process = await sandbox.exec.aio("sleep", "55", timeout=1)
    assert await process.wait.aio() in (-1, 137)

    async def gone():
        return "sleep 55" not in (await shell(sandbox, "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"))[1]

    await eventually(gone)


async def test_tunnels_lead_into_sandboxes_that_use_the_same_port(app):
    serve = ["python3", "-m", "http.server", "8000", "--bind", "0.0.0.0"]
    options = {"encrypted_ports": [8000], "readiness_probe": Probe.with_tcp(8000), "workdir": "/srv"}
    sandboxes = await asyncio.gather(*(Sandbox.create.aio(*serve, app=app, **options) for _ in range(2)))
    for number, sandbox in enumerate(sandboxes):
        await sandbox.wait_until_ready.aio(timeout=60)
        await shell(sandbox, f"echo {number} > /srv/number")
        host, port = (await sandbox.tunnels.aio())[8000].tls_socket
        reader, writer = await asyncio.open_connection(host, port, ssl=ssl.create_default_context())
        writer.write(b"GET /number HTTP/1.0\r\n\r\n")
        assert (await reader.read()).endswith(f"\r\n\r\n{number}\n".encode())
        writer.close()


async def test_the_end_of_a_sandbox_is_the_end_of_all_its_processes(app, emulator):
    sandbox = await Sandbox.create.aio(app=app)
    process = await sandbox.exec.aio("sleep", "1000")
    assert len(emulator.processes(sandbox.object_id)) > 3
    await emulator.preempt(sandbox.object_id)
    assert emulator.processes(sandbox.object_id) == []
    with pytest.raises(NotFoundError):
        await process.wait.aio()
