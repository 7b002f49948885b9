"""A slot server in an emulated Modal sandbox without network, reached through exec; as a program, a client of it."""

import asyncio
import contextlib
import secrets
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import modal

from emulators.modal import ModalEmulator
from sandbox_pool.client.host_client import HostClient
from sandbox_pool.providers.modal.modal_exec import ExecHost, ExecPath, ExecTimes
from sandbox_pool.providers.remote_start import load_server, loader_text, packed_server, token_hash
from sandbox_pool.spec import SandboxSpec
from support.modal_place import emulated_modal

NAME = "h1"
TARGET = "tcp:127.0.0.1:7000"
LIFE_S = 600
QUICK = ExecTimes(heartbeat_s=0.2, silence_s=2.0, orphan_s=60.0, close_s=5.0)


@dataclass
class ModalHost:
    """A host, what it runs in, and the way to it."""

    emulator: ModalEmulator
    host: ExecHost
    token: str
    path: ExecPath

    async def connect(self, **changes):
        """A client; `changes` are of the host as it is dialled."""
        address = self.path.add(NAME, replace(self.host, **changes))
        return await HostClient.connect(address, self.token, dial=self.path.dial)

    @property
    def sandbox(self):
        """Where it runs."""
        return self.host.sandbox

    @contextlib.asynccontextmanager
    async def lease(self):
        """A sandbox of the slot server."""
        client = await self.connect()
        yield await client.lease(0, task_id="task", spec=SandboxSpec())
        await client.close()

    def relays(self):
        """Numbers of the relays that run."""
        return [pid for pid in self.emulator.processes(self.sandbox.object_id) if _is_relay(pid)]


def _is_relay(pid):
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return command.startswith(b"python3\0") and b"class Unpacker" in command


async def _create(token, server_hash):
    app = await modal.App.lookup.aio("exec", create_if_missing=True)
    env = {
        "HRL_TOKEN_SHA256": token_hash(token),
        "HRL_SERVER_SHA256": server_hash,
        "HRL_SCRATCH": "/tmp/hrl",
        "HRL_BIND": "127.0.0.1",
        "HRL_PORT": TARGET.rpartition(":")[2],
        "HRL_LOAD_S": "60",
    }
    command = ("python3", "-c", loader_text(), "--slots", "2", "--host-id", NAME)
    return await modal.Sandbox.create.aio(*command, app=app, env=env, block_network=True, timeout=LIFE_S)


@contextlib.asynccontextmanager
async def modal_host(times=QUICK, runtime="namespaces"):
    """For the length of a test."""
    async with emulated_modal(runtime=runtime) as emulator:
        token = secrets.token_hex(16)
        program, server_hash = packed_server()
        host = ExecHost(await _create(token, server_hash), TARGET, time.time() + LIFE_S)
        path = ExecPath(times)
        async with asyncio.timeout(60):
            await load_server(NAME, path.add(NAME, host), token, program, dial=path.dial)
        try:
            yield ModalHost(emulator, host, token, path)
        finally:
            await path.close()
            await host.sandbox.detach.aio()


async def client_until_killed(sandbox_id, token, orphan_s):
    """Another process that holds a connection."""
    sandbox = await modal.Sandbox.from_id.aio(sandbox_id)
    path = ExecPath(replace(QUICK, orphan_s=orphan_s))
    address = path.add(NAME, ExecHost(sandbox, TARGET, time.time() + LIFE_S))
    await HostClient.connect(address, token, dial=path.dial)
    print("connected", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(client_until_killed(sys.argv[1], sys.stdin.readline().strip(), float(sys.argv[2])))
