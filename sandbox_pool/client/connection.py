"""Client side of the wire: one connection to a slot server, many requests at the same time."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import socket
import ssl
import sys
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from sandbox_pool.client.line import Lines, NotBegun
from sandbox_pool.errors import (
    ImageError,
    IsolationUnavailable,
    LayersMissing,
    ProtocolError,
    SandboxDestroyed,
    SandboxError,
    SandboxFileError,
    SandboxLost,
    ScratchFull,
    StaleLease,
)
from sandbox_pool.server.faults import SlotError
from sandbox_pool.server.serving import wire

T = TypeVar("T")
Header = dict[str, Any]
OnEvent = Callable[[Header, bytes], None]
Dial = Callable[[asyncio.Protocol, str], Awaitable[asyncio.Transport]]
"""Connect the protocol to an address; OSError or TimeoutError when there is no answer."""
_KINDS: Mapping[str, type[SandboxError]] = {
    "stale": StaleLease,
    "lost": SandboxLost,
    "destroyed": SandboxDestroyed,
    "protocol": ProtocolError,
    "isolation": IsolationUnavailable,
    "scratch": ScratchFull,
    "image": ImageError,
}


def error_from_wire(error: Mapping[str, Any]) -> SandboxError:
    """The exception for an error that the server reports."""
    kind, message = str(error.get("kind")), str(error.get("message"))
    if kind == "layers":
        return LayersMissing(message, error.get("layers") or ())
    if kind == "file":
        return SandboxFileError(error.get("errno"), message, error.get("path"))
    return _KINDS.get(kind, SandboxError)(message)


@functools.cache
def _trust(*where: str | None) -> ssl.SSLContext:
    """The certificates this machine trusts: some 20 ms to read, from where OpenSSL's variables say."""
    return ssl.create_default_context()


async def dial(protocol: asyncio.Protocol, address: str) -> asyncio.Transport:
    """Connect to `unix:/path`, `tcp:host:port` or `tls:host:port`."""
    loop = asyncio.get_running_loop()
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if kind == "unix":
        transport, _ = await loop.create_unix_connection(lambda: protocol, rest)
    elif kind in ("tcp", "tls"):
        context = _trust(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")) if kind == "tls" else None
        transport, _ = await loop.create_connection(lambda: protocol, host, int(port), ssl=context)
    else:
        raise ProtocolError(f"not an address of a slot server: {address!r}")
    return transport


def _peer(transport: asyncio.Transport) -> int | None:
    """The process at the other end of a unix socket; None where that cannot be asked."""
    sock = transport.get_extra_info("socket")
    if sock is None or not hasattr(socket, "SO_PEERCRED"):
        return None
    return int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[:4], sys.byteorder)


@dataclass(slots=True)
class _Call:
    reply: asyncio.Future[tuple[Header, bytes]]
    on_event: OnEvent | None = None
    room: asyncio.Semaphore | None = field(default=None)
    """Data frames that may still be sent before the server must acknowledge one."""
    answered: bool = False
    """The answer may come after `reply` was cancelled, and before the caller that was cancelled runs again."""


class Connection(asyncio.Protocol):
    """Frames to and from one slot server. When it is lost, every pending call raises SandboxLost."""

    def __init__(self) -> None:
        self._decoder = wire.Decoder()
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._transport: asyncio.Transport | None = None
        self._lost: list[Callable[[Exception], None]] = []
        self._lines = Lines()
        self._closed_by_us = False
        self.failure: Exception | None = None

    @classmethod
    async def open(cls, address: str, timeout_s: float, dial: Dial) -> Connection:
        """Connect to an address that `dial` understands."""
        connection = cls()
        try:
            async with asyncio.timeout(timeout_s):
                await dial(connection, address)
        except (OSError, TimeoutError) as error:
            raise SandboxLost(f"no slot server at {address}: {str(error) or 'timed out'}") from error
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Part of asyncio.Protocol."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass of it

    def data_received(self, data: bytes) -> None:
        """Part of asyncio.Protocol: pass each frame to its call."""
        try:
            frames = self._decoder.feed(data)
        except wire.WireError as error:
            self._fail(ProtocolError(str(error)))
            return
        for header, body in frames:
            self._frame(header, body)

    def _frame(self, header: Header, body: bytes) -> None:
        call = self._calls.get(header.get("i", 0))
        if call is None:
            return
        event = header.get("ev")
        if event is None:
            call.answered = True
            if not call.reply.done():
                error = header.get("err")
                if error is not None:
                    call.reply.set_exception(error_from_wire(error))
                else:
                    call.reply.set_result((header, body))
        elif event == "ack":
            if call.room is not None:
                call.room.release()
        elif call.on_event is not None:
            call.on_event(header, body)

    def connection_lost(self, exc: Exception | None) -> None:
        """Part of asyncio.Protocol: fail every pending call."""
        self._fail(SandboxLost(f"connection to the slot server lost{f': {exc}' if exc else ''}"))

    def _fail(self, error: Exception) -> None:
        if self.failure is not None:
            return
        self.failure = error
        self._lines.close()
        for call in self._calls.values():
            if not call.reply.done():
                call.reply.set_exception(error)
                call.reply.exception()
        if self._transport is not None:
            self._transport.abort()
        if not self._closed_by_us:
            for callback in self._lost:
                callback(error)

    def on_lost(self, callback: Callable[[Exception], None]) -> None:
        """Call back when the connection is lost; at once when it already is."""
        if self.failure is not None:
            callback(self.failure)
        else:
            self._lost.append(callback)

    def _send(self, header: Header, body: bytes = b"") -> None:
        if self.failure is not None:
            raise SandboxLost(str(self.failure))
        assert self._transport is not None
        self._transport.write(wire.encode(header, body))

    async def call(
        self,
        header: Header,
        body: bytes = b"",
        *,
        on_event: OnEvent | None = None,
        chunks: AsyncIterable[bytes] | None = None,
    ) -> tuple[Header, bytes]:
        """One request and its answer. Cancelling this cancels the request at the server and waits until it is over."""
        if header["op"] == "exec" and (line := self._lines.of(header)) is not None and line.takes(header, body):
            try:
                return await line.run(header, body, on_event, functools.partial(self._cut, header))
            except NotBegun:
                pass
            except SlotError as error:
                raise error_from_wire(error.to_wire()) from None
        reply, data = await self._call(header, body, on_event, chunks)
        if "line" in reply:
            epoch = header["epoch"] if header["op"] == "exec" else reply["epoch"]
            self._lines.promise(header["slot"], epoch, reply.pop("line"))
        return reply, data

    async def _cut(self, header: Header, elapsed_us: int) -> tuple[Header, bytes]:
        """The line to a slot was cut while its command ran: the server knows why."""
        asked: Header = {name: header[name] for name in ("slot", "epoch", "max_chars", "timeout_ms") if name in header}
        return await self._call({"op": "cut", "us": elapsed_us, **asked}, b"", None, None)

    async def take_lines(self, address: str, token: str, hello: Header) -> None:
        """Have the server lend lines to slots, where it is a process of this machine, which can pass descriptors."""
        assert self._transport is not None
        if address.startswith("unix:") and _peer(self._transport) == hello["pid"] and "connection" in hello:
            await self._lines.open(address.partition(":")[2], token, hello["connection"])

    async def _call(
        self, header: Header, body: bytes, on_event: OnEvent | None, chunks: AsyncIterable[bytes] | None
    ) -> tuple[Header, bytes]:
        number = next(self._numbers)
        call = _Call(asyncio.get_running_loop().create_future(), on_event)
        self._calls[number] = call
        header["i"] = number
        try:
            self._send(header, body)
            if chunks is not None:
                await self._stream_until_answered(number, call, chunks)
            return await call.reply
        except asyncio.CancelledError:
            await self._cancel(number, call)
            raise
        finally:
            del self._calls[number]

    async def stream(self, header: Header) -> AsyncIterator[bytes]:
        """The data of one answer, piece by piece; at most a window of it is held here."""
        received: asyncio.Queue[bytes] = asyncio.Queue()
        task = asyncio.get_running_loop().create_task(
            self.call(header, on_event=lambda _, body: received.put_nowait(body))
        )
        waiting: asyncio.Task[bytes] | None = None
        try:
            while not (task.done() and received.empty()):
                waiting = asyncio.get_running_loop().create_task(received.get())
                await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
                if waiting.done():
                    yield waiting.result()
                    if not task.done():
                        self._send({"i": header["i"], "op": "ack"})
                else:
                    waiting.cancel()
            _, rest = await task
            if rest:
                yield rest
        finally:
            if waiting is not None:
                waiting.cancel()
            task.cancel()
            await asyncio.wait([task])

    async def _stream_until_answered(self, number: int, call: _Call, chunks: AsyncIterable[bytes]) -> None:
        """Send a stream; an early answer ends it, a failing source cancels the request."""
        sender = asyncio.get_running_loop().create_task(self._stream(number, call, chunks))
        try:
            racing: list[asyncio.Future[Any]] = [sender, call.reply]
            await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
            if sender.done() and sender.exception() is not None and not call.reply.done():
                await self._cancel(number, call)
                sender.result()
        finally:
            sender.cancel()
            await asyncio.wait([sender])

    async def _stream(self, number: int, call: _Call, chunks: AsyncIterable[bytes]) -> None:
        call.room = asyncio.Semaphore(wire.WINDOW)
        async for chunk in chunks:
            for start in range(0, len(chunk), wire.CHUNK):
                await self._room(call)
                if call.reply.done():  # refused: the answer says why, the rest is not wanted
                    return
                self._send({"i": number, "op": "data"}, chunk[start : start + wire.CHUNK])
        self._send({"i": number, "op": "end"})

    async def _room(self, call: _Call) -> None:
        """Wait for an acknowledgement, or for the answer that makes further ones pointless."""
        assert call.room is not None
        if not call.room.locked():
            await call.room.acquire()
            return
        room = asyncio.ensure_future(call.room.acquire())
        racing: list[asyncio.Future[Any]] = [room, call.reply]
        try:
            await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        finally:
            room.cancel()

    async def _cancel(self, number: int, call: _Call) -> None:
        """The server answers a cancel when nothing of the request is left running."""
        if call.answered or self.failure is not None:
            return
        if call.reply.cancelled():  # because the caller that awaited it was cancelled
            call.reply = asyncio.get_running_loop().create_future()
        self._send({"i": number, "op": "cancel"})
        await asyncio.wait([call.reply], timeout=CANCEL_TIMEOUT_S)
        if call.reply.done() and not call.reply.cancelled():
            call.reply.exception()  # expected; read here so that asyncio does not report it as never retrieved

    async def close(self) -> None:
        """Disconnect; callbacks for a lost connection are not called."""
        self._closed_by_us = True
        if self._transport is not None:
            self._transport.close()
        self._fail(SandboxLost("the connection was closed"))


CANCEL_TIMEOUT_S = 15.0
"""Killing a command's tree takes milliseconds; a server that needs longer than this is not waited for."""


class TaskSet:
    """Background tasks of one owner: the event loop keeps only weak references, so somebody must hold them."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run this in the background, in the running loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    def cancel(self) -> None:
        """Cancel all of them; `finish` waits for their end."""
        for task in list(self._running):
            task.cancel()

    async def finish(self) -> None:
        """Return when all of them are done, those that they started included. Their errors are not raised here."""
        while self._running:
            await asyncio.gather(*self._running, return_exceptions=True)
