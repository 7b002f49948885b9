"""A provider of your own: slot servers wherever a command can start a Python, here on this machine.

    hermes-rl pool check --provider examples.own_provider:OwnProvider

Put `srun`, `kubectl exec` or the like into `launcher`; what it starts must be reachable at `address`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from sandbox_pool.errors import SandboxError
from sandbox_pool.journal.owner import start_ticks
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext, Texts, checked_options
from sandbox_pool.providers.remote_start import load_server, loader_text, packed_server, token_hash
from sandbox_pool.spec import SandboxSpec


class OwnOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
    launcher: Texts = ()
    address: str = "127.0.0.1"
    python: str = "python3"


class OwnProvider:
    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        self._context, self._options = context, checked_options(OwnOptions, options)
        self._folder = context.state_dir / "own_provider"  # stands for the labels of a real place

    def host_key(self, spec: SandboxSpec) -> str:
        return "own"

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        token, (program, sha256) = self._context.token(name), packed_server()
        record = self._read(name) or await self._launch(name, sha256, token)
        address = f"tcp:{self._options.address}:{record['port']}"
        await load_server(name, address, token, program)  # the pool limits how long it may take
        return Host(name, address, token, identity=str(record["pid"]))

    async def _launch(self, name: str, sha256: str, token: str) -> dict[str, Any]:
        with socket.create_server((self._options.address, 0)) as free:
            port = free.getsockname()[1]
        scratch = (self._context.scratch_dir or Path(tempfile.gettempdir())) / name
        settings = {"BIND": self._options.address, "PORT": port, "SCRATCH": scratch, "LOAD_S": 60}
        settings |= {"SERVER_SHA256": sha256, "TOKEN_SHA256": token_hash(token)}
        variables = os.environ | {f"HRL_{key}": str(value) for key, value in settings.items()}
        command = [*self._options.launcher, self._options.python, "-c", loader_text()]
        command += self._context.server_arguments(name, level=None)
        process = await asyncio.create_subprocess_exec(*command, env=variables, stdout=asyncio.subprocess.DEVNULL)
        record = {"pid": process.pid, "since": start_ticks(process.pid), "port": port, "owner": self._context.owner}
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (self._folder / name).write_text(json.dumps(record))
        return record

    async def stop(self, name: str) -> None:
        record = self._read(name)
        if record is None:
            return
        ended = await asyncio.to_thread(_end, record["pid"], record["since"])
        if not ended:
            raise SandboxError(f"{name} did not end")
        (self._folder / name).unlink()

    async def list(self) -> list[HostRecord]:
        names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        found = {name: record for name in names if (record := self._read(name))}
        return [HostRecord(name, record["owner"], "running") for name, record in found.items()]

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads((self._folder / name).read_text())
        except FileNotFoundError:
            return None
        return found


def _end(pid: int, since: int) -> bool:
    for _ in range(400):
        if start_ticks(pid) != since:
            return True
        os.kill(pid, signal.SIGTERM)  # the loader ends its server and cleans up
        time.sleep(0.05)
    return False
