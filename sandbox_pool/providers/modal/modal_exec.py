"""Reaches slot servers in Modal sandboxes that no tunnel leads to (`block_network`, inbound rules): through exec.

A connection is one `Sandbox.exec` of the relay (`modal_relay.py`), which joins its stdin and stdout with the socket
that the loader, and then the slot server, listens on inside the sandbox. A provider uses it like this:

    self.exec_path = ExecPath()
    address = self.exec_path.add(name, ExecHost(sandbox, f"tcp:127.0.0.1:{port}", expires_at_s))   # "exec:<name>"
    await bring_to_life(name, address, token, program, dial=self.dial)    # loads the server through the same relay
    async def dial(self, protocol, address):                              # the provider is a `Dials`
        return await (self.exec_path.dial if ExecPath.knows(address) else dial)(protocol, address)
    self.exec_path.drop(name)         # in stop(); await self.exec_path.close() in close()

What it promises:

- **Exact or lost.** Cuts of a stream are resumed where they happened, by the SDK and then, for a bounded number of
  tries, by iterating the stream again. Checksums over all that was sent prove each block before it is passed on; what
  cannot be resumed or proven ends the connection, and with it every pending call, with `SandboxLost`.
- **No silence.** Each side gives a sign of life every `heartbeat_s`. The pool's end takes a relay that was not heard of
  for `silence_s` for lost, whatever the SDK still hopes for.
- **No relay is left.** Closing a connection, losing it, and cancelling a dial close the relay's stdin, which ends it.
  When this process dies by SIGKILL the relay ends after `orphan_s` without a sign of life, and the `owner_ttl_s` of the
  slot server runs from there. The exec itself times out with the sandbox's life: after it there is nothing to reconnect
  to, and before it a connection that ended is dialled again like any other.
- Nothing secret is in the arguments of the exec, which are a few KB (Modal takes 64 KiB).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox_pool.providers.modal.modal_transport import ExecTimes, ExecTransport, say_end

if TYPE_CHECKING:
    import modal

log = logging.getLogger(__name__)

SCHEME = "exec:"
ABANDON_S = 15.0
"""How long an exec that nobody waits for any more may take to start, so that it can be told to end."""
CONNECT_S = 3.0
"""How long a relay waits for somebody to listen: the loader, a sandbox's first process, may still be starting."""


@functools.cache
def relay_text() -> str:
    """The program that each exec runs."""
    return Path(__file__).with_name("modal_relay.py").read_text()


@dataclass(frozen=True)
class ExecHost:
    """A sandbox and where the slot server listens in it."""

    sandbox: modal.Sandbox
    target: str
    """`tcp:127.0.0.1:port` or `unix:/path`, as seen in the sandbox"""
    expires_at_s: float
    """Unix time at which Modal ends the sandbox, and its execs with it."""
    python: str = "python3"

    def exec_timeout_s(self) -> int:
        """Modal counts an exec's life in whole seconds."""
        return max(1, math.ceil(self.expires_at_s - time.time()))


@dataclass
class ExecPath:
    """The hosts that are reached through exec, by their names."""

    times: ExecTimes = field(default_factory=ExecTimes)
    _hosts: dict[str, ExecHost] = field(default_factory=dict, init=False)
    _ends: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    """Each is done when its relay was told to end."""
    _open: set[ExecTransport] = field(default_factory=set, init=False)

    @staticmethod
    def knows(address: str) -> bool:
        """Whether this is the address of a host that is reached through exec."""
        return address.startswith(SCHEME)

    def add(self, name: str, host: ExecHost) -> str:
        """From now on the host can be dialled; returns its address."""
        self._hosts[name] = host
        return SCHEME + name

    def drop(self, name: str) -> None:
        """The sandbox is gone."""
        self._hosts.pop(name, None)

    async def dial(self, protocol: asyncio.Protocol, address: str) -> asyncio.Transport:
        """Start a relay and put the protocol on it; ConnectionError says why not. The caller sets a time limit."""
        host = self._hosts.get(address.removeprefix(SCHEME))
        if host is None:
            raise ConnectionError(f"there is no sandbox for {address}")
        transport = ExecTransport(await self._exec(host), protocol, self.times)
        self._keep(transport.life)
        transport.life.add_done_callback(lambda _: self._open.discard(transport))
        self._open.add(transport)
        try:
            await transport.connected
        except BaseException:
            transport.abort()
            raise
        return transport

    async def _exec(self, host: ExecHost) -> modal.container_process.ContainerProcess:
        """A running relay. An exec can not be taken back: cancelled on the way it is left to end, and told to."""
        import modal

        orphan_s, patience_s = str(self.times.orphan_s), str(CONNECT_S)
        arguments = (host.python, "-I", "-S", "-c", relay_text(), host.target, orphan_s, patience_s)
        starting = asyncio.ensure_future(
            host.sandbox.exec.aio(*arguments, timeout=host.exec_timeout_s(), text=False, workdir="/")
        )
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._keep(asyncio.ensure_future(_abandon(starting)))
            raise
        except modal.exception.Error as error:
            raise ConnectionError(f"no exec in the sandbox: {error}") from error

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    async def close(self) -> None:
        """Close what is open in this loop and wait, for a bounded time, until its relays were told to end."""
        here = asyncio.get_running_loop()
        for transport in list(self._open):
            if transport.life.get_loop() is here:
                transport.abort()
        ends = [task for task in list(self._ends) if task.get_loop() is here]
        if ends:
            _, late = await asyncio.wait(ends, timeout=2 * self.times.close_s)
            for task in late:
                task.cancel()


async def _abandon(starting: asyncio.Future[modal.container_process.ContainerProcess]) -> None:
    """Nobody waits for this exec any more. Should even this fail, the relay's own patience ends it."""
    import modal

    try:
        async with asyncio.timeout(ABANDON_S):
            with contextlib.suppress(modal.exception.Error, OSError):
                await say_end(await starting)
    except TimeoutError:
        log.info("an exec that nobody waits for was not answered in %g s", ABANDON_S)
    finally:
        starting.cancel()
