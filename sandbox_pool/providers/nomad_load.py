"""Brings a host on a node to life: hands token and slot server to its loader, and makes sure of who answers after."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from typing import Any

from sandbox_pool.client import HostClient
from sandbox_pool.errors import HostStartFailed, IsolationUnavailable, SandboxError, SandboxLost, ScratchFull

RETRY_S = 0.05
CONNECT_S = 5.0


def packed_server() -> tuple[bytes, str]:
    """The slot server as one file, and its hash."""
    from sandbox_pool.server import pack

    data = pack()
    return data, hashlib.sha256(data).hexdigest()


def token_hash(token: str) -> str:
    """What the job may say of a host's token."""
    return hashlib.sha256(token.encode()).hexdigest()


async def bring_to_life(name: str, host: str, port: int, token: str, program: bytes) -> None:
    """Load the host unless it already runs, then check that it is the right one. Call it within a timeout."""
    await _load(name, host, port, token, program)
    await probe(name, f"tcp:{host}:{port}", token)


async def probe(name: str, address: str, token: str) -> None:
    """Raise unless a slot server with our token answers there under this name."""
    client = await HostClient.connect(address, token)
    found = client.info.host_id
    await client.close()
    if found != name:
        raise SandboxLost(f"{address} is {found}, not {name}")


async def _load(name: str, host: str, port: int, token: str, program: bytes) -> None:
    reader, writer = await _connect(host, port)
    try:
        writer.write(f"load {token}\n".encode())
        wish = await reader.readline()
        if wish not in (b"need\n", b"have\n"):
            return  # no loader, or one that will not have us: the probe tells which
        if wish == b"need\n":
            writer.write(b"%d\n" % len(program) + program)
            await writer.drain()
        line = await reader.readline()
    except (ConnectionError, asyncio.IncompleteReadError):
        return  # a slot server that runs already cuts off who does not speak its language
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    _require_ready(name, line)


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The task is running, so its first process will listen any moment."""
    while True:
        began_s = time.monotonic()
        try:
            return await asyncio.wait_for(asyncio.open_connection(host, port), CONNECT_S)
        except (OSError, TimeoutError):
            await asyncio.sleep(max(0.0, RETRY_S - (time.monotonic() - began_s)))


def _require_ready(name: str, line: bytes) -> None:
    try:
        said: Any = json.loads(line)
    except ValueError:
        said = None
    if isinstance(said, dict) and "error" not in said:
        return
    message = str(said["error"]) if isinstance(said, dict) else f"the loader said {line[:200]!r}"
    raise _start_error(f"{name}: {message}")


def _start_error(message: str) -> SandboxError:
    for kind in (IsolationUnavailable, ScratchFull):
        if kind.__name__ in message:
            return kind(message)
    return HostStartFailed(message)
