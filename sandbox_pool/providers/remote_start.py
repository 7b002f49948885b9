"""Brings a host elsewhere to life: hands token and slot server to its loader, and makes sure of who answers after."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import ssl
import time
from pathlib import Path
from typing import Any

from sandbox_pool.client.connection import Dial, dial
from sandbox_pool.client.host_client import HostClient
from sandbox_pool.errors import HostStartFailed, IsolationUnavailable, SandboxError, SandboxLost, ScratchFull
from sandbox_pool.server.build.packing import pack

RETRY_S = 0.05
CONNECT_S = 5.0
LOADER = Path(__file__).with_name("remote_loader.py")


def loader_text() -> str:
    """The first program of a host, without its docstring: the text rides in every start."""
    _, _, rest = LOADER.read_text().partition('"""\n\nfrom __future__')
    return f"from __future__{rest}"


def packed_server() -> tuple[bytes, str]:
    """The slot server as one file, and its hash."""
    data = pack(any_machine=True)
    return data, hashlib.sha256(data).hexdigest()


def token_hash(token: str) -> str:
    """What may be said in public of a host's token."""
    return hashlib.sha256(token.encode()).hexdigest()


async def bring_to_life(name: str, address: str, token: str, program: bytes, dial: Dial = dial) -> None:
    """Load the host unless it already runs, then check that it is the right one. Call it within a timeout."""
    while not await _load(name, address, token, program, dial):
        # Cut off: a slot server that runs already, or a tunnel behind which nobody listens yet. Its greeting tells.
        began_s = time.monotonic()
        try:
            client = await HostClient.connect(address, token, dial=dial)
        except (SandboxLost, TimeoutError):
            await _pause(began_s)
            continue
        await _require_name(name, address, client)
        return
    await _require_name(name, address, await HostClient.connect(address, token, dial=dial))


async def _require_name(name: str, address: str, client: HostClient) -> None:
    """Raise unless it is the host of this name that answers there."""
    found = client.info.host_id
    await client.close()
    if found != name:
        raise SandboxLost(f"{address} is {found}, not {name}")


async def _load(name: str, address: str, token: str, program: bytes, dial: Dial) -> bool:
    """Hand everything to the loader; False when there is none that would have it."""
    reader, writer = await _connect(address, dial)
    try:
        writer.write(f"load {token}\n".encode())
        wish = await reader.readline()
        if wish not in (b"need\n", b"have\n"):
            return False
        if wish == b"need\n":
            writer.write(b"%d\n" % len(program) + program)
            await writer.drain()
        line = await reader.readline()
    except (OSError, asyncio.IncompleteReadError):
        return False  # it may run all the same: only the answer is lost
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if line:
        _require_ready(name, line)
    return bool(line)


async def _connect(address: str, dial: Dial) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """The host is running, so its first process will listen any moment."""
    loop = asyncio.get_running_loop()
    while True:
        began_s = time.monotonic()
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            # Not wait_for: in Python 3.11 that loses a cancellation which comes together with an error.
            async with asyncio.timeout(CONNECT_S):
                transport = await dial(protocol, address)
            return reader, asyncio.StreamWriter(transport, protocol, reader, loop)
        except ssl.SSLCertVerificationError as error:
            raise HostStartFailed(f"{address} is not to be trusted: {error}") from error
        except (OSError, TimeoutError):
            await _pause(began_s)


async def _pause(began_s: float) -> None:
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
