"""Starts the slot server on a remote host: sends token and program to its loader, then checks which host answers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import ssl
import time
from pathlib import Path
from typing import Any

from sandbox_pool.client.connection import Dial, dial
from sandbox_pool.client.host_client import HostClient
from sandbox_pool.errors import HostStartFailed, SandboxLost
from sandbox_pool.providers.base import ProviderContext, start_error
from sandbox_pool.server.build.packing import pack

RETRY_S = 0.05
CONNECT_S = 5.0
LOADER = Path(__file__).with_name("remote_loader.py")


def loader_text() -> str:
    """The source of the loader, without its docstring: every start sends it."""
    _, _, rest = LOADER.read_text().partition('"""\n\nfrom __future__')
    return f"from __future__{rest}"


@functools.cache
def packed_server() -> tuple[bytes, str]:
    """The slot server as one file, and its hash."""
    data = pack(any_machine=True)
    return data, hashlib.sha256(data).hexdigest()


def token_hash(token: str) -> str:
    """The form of a host's token that may be stored in public."""
    return hashlib.sha256(token.encode()).hexdigest()


def loader_settings(context: ProviderContext, name: str, bind: str, scratch: Path, load_s: float) -> dict[str, str]:
    """The loader's variables, of which none is secret."""
    return {
        "HRL_BIND": bind,
        # By the host's name, as its cgroups are: those of containers may be all in one place.
        "HRL_SCRATCH": str(scratch / f"hermes-rl-{name.rpartition('-')[2]}"),
        "HRL_SERVER_SHA256": packed_server()[1],
        "HRL_TOKEN_SHA256": token_hash(context.token(name)),
        "HRL_LOAD_S": f"{load_s:g}",
    }


async def load_server(name: str, address: str, token: str, program: bytes, dial: Dial = dial) -> None:
    """Send the server unless it already runs, then check that it is the right host. Call it within a timeout."""
    while not await _load(name, address, token, program, dial):
        # Cut off: either a slot server runs already, or nothing listens yet behind a tunnel. A connect shows which.
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
    """Raise unless the host of this name answered."""
    found = client.info.host_id
    await client.close()
    if found != name:
        raise SandboxLost(f"{address} is {found}, not {name}")


async def _load(name: str, address: str, token: str, program: bytes, dial: Dial) -> bool:
    """Send everything to the loader; False when none answers."""
    reader, writer = await _connect(address, dial)
    try:
        writer.write(f"load {token}\n".encode())
        answer = await reader.readline()
        if answer not in (b"need\n", b"have\n"):
            return False
        if answer == b"need\n":
            writer.write(b"%d\n" % len(program) + program)
            await writer.drain()
        line = await reader.readline()
    except (OSError, asyncio.IncompleteReadError):
        return False  # the server may run: only the answer is lost
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    if line:
        _require_ready(name, line)
    return bool(line)


async def _connect(address: str, dial: Dial) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Retry until its first process listens: the host is running, so it soon will."""
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
            raise HostStartFailed(f"{address} has a certificate that is not trusted: {error}") from error
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
    raise start_error(name, message)
