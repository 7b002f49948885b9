"""Reaches slot servers in Modal sandboxes without a tunnel (`block_network`, inbound rules): through `Sandbox.exec`.

A connection is one `Sandbox.exec` of the relay (`modal_relay.py`), which joins its stdin and stdout with the socket
that the loader, and then the slot server, listens on inside the sandbox. A provider uses it like this:

    self.exec_path = ExecPath()
    address = self.exec_path.add(name, ExecHost(sandbox, f"tcp:127.0.0.1:{port}", expires_at_s))   # "exec:<name>"
    await load_server(name, address, token, program, dial=self.dial)      # loads the server through the same relay
    async def dial(self, protocol, address):                              # the provider is a `Dials`
        return await (self.exec_path.dial if ExecPath.knows(address) else dial)(protocol, address)
    self.exec_path.drop(name)         # in stop(); await self.exec_path.close() in close()

What it promises:

- **Exact or lost.** Cuts of a stream are resumed where they happened, by the SDK and then, for a bounded number of
  tries, by iterating the stream again. Checksums over all that was sent prove each block before it is passed on; what
  cannot be resumed or proven ends the connection, and with it every pending call, with `SandboxLost`.
- **No silence.** The pool sends a heartbeat every `heartbeat_s`, and the relay answers it. A relay that sent nothing
  for `silence_s` is lost, even while the SDK still retries.
- **No relay is left.** Closing a connection, losing it, and cancelling a dial close the relay's stdin, which ends it.
  When this process dies by SIGKILL the relay ends after `orphan_s` without a heartbeat, and the `owner_ttl_s` of the
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
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandbox_pool.providers.modal.modal_relay import MAX_BLOCK, Packer, Unpacker

if TYPE_CHECKING:
    import modal

log = logging.getLogger(__name__)

SCHEME = "exec:"
ABANDON_S = 15.0
"""How long an exec whose caller was cancelled may take to start, so that it can be ended."""
CONNECT_S = 3.0
"""How long a relay retries to connect: the loader, a sandbox's first process, may still be starting."""
RESUME_PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 2.0, 2.0, 2.0)
"""Before each further try on a stream that was cut; the SDK tries for 10 s itself each time."""
MAX_WRITE = 1 << 20
"""Bytes per write to stdin: each is a round trip, and the SDK would take 16 MiB."""
HIGH_WATER = 4 << 20
EXPLAIN_S = 2.0


@dataclass(frozen=True)
class ExecTimes:
    """How long the two ends of a relay wait for each other."""

    heartbeat_s: float = 5.0
    silence_s: float = 40.0
    """A relay that sent nothing for so long is lost. Above the 10 s for which the SDK resumes a cut by itself."""
    orphan_s: float = 120.0
    """A relay that hears nothing for so long ends. Far above the pauses of a busy event loop."""
    close_s: float = 5.0
    """How long to try to close the relay; after `orphan_s` it ends by itself."""


def resumable_errors() -> tuple[type[Exception], ...]:
    """Errors of the SDK after which a stream can be resumed; all others mean that the exec or its sandbox is gone."""
    from grpclib.exceptions import StreamTerminatedError
    from modal import exception

    cut = (exception.ServiceError, exception.InternalError, exception.ConnectionError, StreamTerminatedError, OSError)
    return (*cut, exception.AuthError)


async def resumed(stream: modal.io_streams.StreamReader[bytes]) -> AsyncGenerator[bytes, None]:
    """All chunks of a stream, each once: after a cut it is iterated again, which goes on at the offset reached."""
    resumable = resumable_errors()
    pauses = iter(RESUME_PAUSES_S)
    while True:
        try:
            async for chunk in stream:
                pauses = iter(RESUME_PAUSES_S)
                yield chunk
            return
        except resumable:
            pause_s = next(pauses, None)
            if pause_s is None:
                raise
            await asyncio.sleep(pause_s)


async def drained(stdin: modal.io_streams.StreamWriter) -> None:
    """Return when all that was written is in the sandbox. A failed try leaves it in the buffer for the next."""
    resumable = resumable_errors()
    for pause_s in (*RESUME_PAUSES_S, None):
        try:
            await stdin.drain.aio()
            return
        except resumable:
            if pause_s is None:
                raise
            await asyncio.sleep(pause_s)


async def close_stdin(process: modal.container_process.ContainerProcess[bytes]) -> None:
    """Close the relay's stdin, which ends it."""
    process.stdin.write_eof()
    await process.stdin.drain.aio()


class ExecTransport(asyncio.Transport):
    """Bytes to and from a relay. `connected` is done when the relay is connected, `life` when the relay was closed."""

    def __init__(
        self, process: modal.container_process.ContainerProcess[bytes], protocol: asyncio.Protocol, times: ExecTimes
    ) -> None:
        super().__init__()
        loop = asyncio.get_running_loop()
        self._process = process
        self._protocol = protocol
        self._times = times
        self._packer = Packer()
        self._queue = bytearray()
        self._queued = asyncio.Event()
        self._heartbeat_due = False
        self._paused = False
        self._closing = False
        self._silent_rounds = 0
        self._stoppable: list[asyncio.Task[None]] = []
        self.connected: asyncio.Future[None] = loop.create_future()
        self.life = loop.create_task(self._live())

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Queue bytes; the protocol is paused while there are too many."""
        if self._closing:
            return
        self._queue += data
        self._queued.set()
        if not self._paused and len(self._queue) > HIGH_WATER:
            self._paused = True
            self._protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        """Bytes that are queued."""
        return len(self._queue)

    def can_write_eof(self) -> bool:
        """The end of stdin is the end of the relay."""
        return False

    def is_closing(self) -> bool:
        """Whether it is or will be closed."""
        return self._closing

    def close(self) -> None:
        """Send what is queued, then end the relay."""
        self._closing = True
        self._queued.set()

    def abort(self) -> None:
        """End the relay without sending what is queued."""
        self._queue.clear()
        self.close()
        for task in self._stoppable:
            task.cancel()

    async def _live(self) -> None:
        loop = asyncio.get_running_loop()
        reader = loop.create_task(self._read())
        self._stoppable = [loop.create_task(self._write()), loop.create_task(self._watch())]
        error: Exception | None = ConnectionAbortedError("the event loop ended")
        try:
            done, _ = await asyncio.wait([reader, *self._stoppable], return_when=asyncio.FIRST_COMPLETED)
            error = None if self._closing else await self._explain(done.pop().exception())
        finally:
            self._closing = True
            self._tell(error)
            for task in self._stoppable:
                task.cancel()
            await asyncio.gather(*self._stoppable, return_exceptions=True)
            await self._end(reader)

    async def _end(self, reader: asyncio.Task[None]) -> None:
        """Close the relay and wait for its end; one that cannot be reached ends after `orphan_s`."""
        with contextlib.suppress(*resumable_errors(), *_gone_errors()):
            async with asyncio.timeout(self._times.close_s):
                await close_stdin(self._process)
                await asyncio.wait([reader])
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)

    def _tell(self, error: Exception | None) -> None:
        """Tell the protocol of the end if it was told of the beginning, else the caller of `dial`."""
        if not self.connected.done():
            self.connected.set_exception(error or ConnectionAbortedError("closed before it was connected"))
            self.connected.exception()
        elif not self.connected.cancelled():
            self._protocol.connection_lost(error)

    async def _read(self) -> None:
        blocks = Unpacker()
        async with contextlib.aclosing(resumed(self._process.stdout)) as chunks:
            async for chunk in chunks:
                self._silent_rounds = 0
                for block in blocks.feed(chunk):
                    self._take(block)

    def _take(self, block: bytes) -> None:
        if not self.connected.done():
            self._protocol.connection_made(self)
            self.connected.set_result(None)
        if block and not self._closing:
            self._protocol.data_received(block)

    async def _write(self) -> None:
        stdin = self._process.stdin
        while not (self._closing and not self._queue):
            await self._queued.wait()
            self._queued.clear()
            while self._queue or self._heartbeat_due:
                stdin.write(self._next_blocks())
                await drained(stdin)
                if self._paused and len(self._queue) <= HIGH_WATER // 4:
                    self._paused = False
                    self._protocol.resume_writing()

    def _next_blocks(self) -> bytes:
        """The next bytes of the queue in blocks, and a heartbeat when one is due."""
        taken = bytes(self._queue[:MAX_WRITE])
        del self._queue[:MAX_WRITE]
        starts = range(0, len(taken), MAX_BLOCK)
        blocks = [self._packer.pack(taken[start : start + MAX_BLOCK]) for start in starts]
        if self._heartbeat_due:
            self._heartbeat_due = False
            blocks.append(self._packer.pack(b""))
        return b"".join(blocks)

    async def _watch(self) -> None:
        """Counts rounds, not time: a blocked loop could not have received anything."""
        allowed = max(1, round(self._times.silence_s / self._times.heartbeat_s))
        while self._silent_rounds <= allowed:
            self._silent_rounds += 1
            self._heartbeat_due = True
            self._queued.set()
            await asyncio.sleep(self._times.heartbeat_s)
        raise ConnectionError(f"the relay sent nothing for {self._times.silence_s:g} s")

    async def _explain(self, error: BaseException | None) -> Exception:
        """Why the relay ended by itself: the error here, and the relay's stderr."""
        said = bytearray()
        code: int | None = None
        with contextlib.suppress(*resumable_errors(), *_gone_errors()):
            async with asyncio.timeout(EXPLAIN_S):
                code = await self._process.wait.aio()
                async for chunk in resumed(self._process.stderr):
                    said += chunk
        reasons = [str(error) or repr(error)] if error is not None else []
        if code is not None:
            reasons.append(f"the relay ended with {code}")
        if said:
            reasons.append(said[-500:].decode("utf-8", "replace").strip())
        return ConnectionError("; ".join(reasons) or "the relay closed its stdout")


def _gone_errors() -> tuple[type[Exception], ...]:
    """Errors of the SDK for an exec whose sandbox is gone or whose stdin is closed already."""
    import modal

    return (modal.exception.Error, ValueError)


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
    """Each is done when its relay was closed."""
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
        """A running relay. An exec cannot be cancelled: when the caller is, it is closed once it runs."""
        import modal

        orphan_s, connect_s = str(self.times.orphan_s), str(CONNECT_S)
        arguments = (host.python, "-I", "-S", "-c", relay_text(), host.target, orphan_s, connect_s)
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
        """Close what is open in this loop and wait, for a bounded time, until its relays were closed."""
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
    """Close an exec whose caller was cancelled. If even this fails, the relay ends after `orphan_s`."""
    import modal

    try:
        async with asyncio.timeout(ABANDON_S):
            with contextlib.suppress(modal.exception.Error, OSError):
                await close_stdin(await starting)
    except TimeoutError:
        log.info("an exec whose caller was cancelled did not start in %g s", ABANDON_S)
    finally:
        starting.cancel()
