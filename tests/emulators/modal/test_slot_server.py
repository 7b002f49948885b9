"""The project's slot server in an emulated sandbox, reached through the tunnel: what it finds there.

In gVisor, Modal's kernel, that is `namespaces` without user namespaces. Slow there: tests/live/containers/prepare.sh.
"""

import asyncio
import secrets

import pytest
from modal import Sandbox

from sandbox_pool.client.host_client import HostClient
from sandbox_pool.server.build.packing import pack
from sandbox_pool.spec import SandboxSpec

NO_LIMITS = {"memory", "pids", "cpu"}
RUNTIMES = [
    pytest.param("namespaces", NO_LIMITS, id="namespaces"),
    pytest.param("gvisor", NO_LIMITS | {"tty"}, id="gvisor", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("emulator", "missing"), RUNTIMES, indirect=["emulator"])
async def test_slots_are_isolated_by_namespaces_in_an_emulated_sandbox(app, emulator, missing):
    sandbox = await Sandbox.create.aio("sleep", "infinity", app=app, encrypted_ports=[8000])
    await sandbox.filesystem.write_bytes.aio(pack(), "/hermes/server.pyz")
    command = ["python3", "/hermes/server.pyz", "--scratch", "/var/hermes", "--listen", "tcp:0.0.0.0:8000"]
    server = await sandbox.exec.aio(*command, "--slots", "2", "--die-with-parent")
    token = secrets.token_hex(16)
    server.stdin.write(f"{token}\n")
    await server.stdin.drain.aio()
    assert "address" in await anext(aiter(server.stdout))

    host, port = (await sandbox.tunnels.aio())[8000].tls_socket
    client = await HostClient.connect(f"tls:{host}:{port}", token)
    assert (client.info.isolation, set(client.info.missing)) == ("namespaces", missing), client.info

    async def use(slot):
        box = await client.lease(slot, task_id=f"t{slot}", spec=SandboxSpec())
        seen = await box.exec(f"echo {slot} > /tmp/mine; sleep 0.2; cat /tmp/mine; uname -r")
        report = await client.release(slot, box.epoch)
        return seen.output.split()[0], report.clean

    assert await asyncio.gather(use(0), use(1)) == [("0", True), ("1", True)]
    await client.close()
