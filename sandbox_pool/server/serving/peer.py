"""One client's connection: token first, then requests side by side, answers as they come."""

from __future__ import annotations

import array
import asyncio
import contextlib
import hmac
import itertools
import os
import socket
from typing import TYPE_CHECKING, Any

from ..faults import SlotError
from . import wire
from .wire import LINE_NUMBER, Header

if TYPE_CHECKING:
    from ..slots.instance import Instance
    from .service import Service

Reply = tuple[dict[str, Any], bytes]
"""Header fields and body of an answer."""
HELLO_TIMEOUT_S = 10.0
_numbers = itertools.count(1)


class Request:
    """A request under way: its answer, its pushes, its incoming stream."""

    __slots__ = ("_acks", "_chunks", "_connection", "header", "id", "task")

    def __init__(self, connection: Connection, header: Header) -> None:
        self._connection = connection
        self.header = header
        self.id: int = header["i"]
        self.task: asyncio.Task[None] | None = None
        # Made when needed: most requests have no stream.
        self._chunks: asyncio.Queue[bytes | None] | None = None
        self._acks: asyncio.Semaphore | None = None

    @property
    def chunks(self) -> asyncio.Queue[bytes | None]:
        """Pieces of the incoming stream, None at its end."""
        if self._chunks is None:
            self._chunks = asyncio.Queue()
        return self._chunks

    def push(self, event: str, body: bytes = b"", **values: Any) -> None:
        """Send an event of this request."""
        self._connection.send({"i": self.id, "ev": event, **values}, body)

    async def push_data(self, data: bytes) -> None:
        """One piece of an outgoing stream, when the client has room for it."""
        if self._acks is None:
            self._acks = asyncio.Semaphore(wire.WINDOW)
        await self._acks.acquire()
        self.push("data", data)

    async def next_chunk(self) -> bytes | None:
        """One piece of the incoming stream; None at its end."""
        data = await self.chunks.get()
        if data is not None:
            self.push("ack")
        return data

    def lend(self, instance: Instance) -> dict[str, Any]:
        """Lend the client the session, if it has a connection that takes descriptors; for the answer."""
        return self._connection.lend(instance)

    def acknowledged(self) -> None:
        """The client took one piece."""
        if self._acks is not None:
            self._acks.release()


class Connection(asyncio.Protocol):
    """Frames of one client."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.transport: asyncio.Transport | None = None
        self.authenticated = False
        self._decoder = wire.Decoder(wire.MAX_HELLO)
        self.requests: dict[int, Request] = {}
        self._newest = -1
        """Number of the last request: one that comes again is never run again."""
        self.number = next(_numbers)
        self.passing: Connection | None = None
        """The client's connection that descriptors are sent on."""
        self.most_lines = 0
        """How many descriptors the client has room for."""
        self._lines = itertools.count(1)
        self._lent = 0
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A peer that does not say hello in time is cut off."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._deadline = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Anything but a frame ends the connection."""
        try:
            for header, body in self._decoder.feed(data):
                if self.authenticated:
                    self._frame(header, body)
                else:
                    self._hello(header)
        except wire.WireError as error:
            self.send({"i": 0, "err": SlotError("protocol", str(error)).to_wire()})
            self.close()

    def _hello(self, header: Header) -> None:
        token = str(header.get("token", ""))
        if header.get("op") != "hello" or not hmac.compare_digest(token.encode(), self.service.token.encode()):
            self.send({"i": header.get("i"), "err": SlotError("protocol", "bad token").to_wire()})
            self.close()
            return
        if header.get("protocol") != wire.PROTOCOL:
            text = f"this server speaks protocol {wire.PROTOCOL}, the client {header.get('protocol')}"
            self.send({"i": header.get("i"), "err": SlotError("protocol", text).to_wire()})
            self.close()
            return
        self.authenticated = True
        self._decoder.max_frame = wire.MAX_FRAME
        if self._deadline is not None:
            self._deadline.cancel()
        self.service.connected(self)
        if "lines_of" in header:
            for other in self.service.connections:
                if other.number == header["lines_of"]:
                    other.passing, other.most_lines = self, int(header["most"])
            return
        self.send({"i": header.get("i"), "connection": self.number, **self.service.info()})

    def lend(self, instance: Instance) -> dict[str, Any]:
        """Pass a line to the session of a slot to the client; empty when it cannot take one, or a command runs."""
        lent = None if self.passing is None or self._lent >= self.most_lines else instance.lend(self._line_ended)
        if lent is None or self.passing is None:
            return {}
        self._lent += 1
        number, (line, facts) = next(self._lines), lent
        with line:  # when nobody takes the other one, the keeper sees the end of the line
            self.passing.pass_on(number, line)
        return {"line": {"number": number, **facts}}

    def _line_ended(self) -> None:
        self._lent -= 1

    def pass_on(self, number: int, line: socket.socket) -> None:
        """Send a descriptor with its number; a client that does not take it goes without."""
        if self.transport is None or self.transport.is_closing():
            return
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [line.fileno()]))
        with contextlib.suppress(OSError), self._own_socket() as own:
            own.sendmsg([number.to_bytes(LINE_NUMBER, "big")], [rights], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _own_socket(self) -> socket.socket:
        assert self.transport is not None
        return socket.socket(fileno=os.dup(self.transport.get_extra_info("socket").fileno()))

    def _frame(self, header: Header, body: bytes) -> None:
        number, op = header.get("i"), header.get("op")
        if not isinstance(number, int):
            raise wire.WireError("frame without a request number")
        request = self.requests.get(number)
        if op == "data" and request is not None:
            request.chunks.put_nowait(body)
        elif op == "end" and request is not None:
            request.chunks.put_nowait(None)
        elif op == "ack" and request is not None:
            request.acknowledged()
        elif op == "cancel":
            if request is not None and request.task is not None:
                # Not at once: a task that is cancelled before it ever ran cannot answer.
                asyncio.get_running_loop().call_soon(request.task.cancel)
        elif op not in ("data", "end", "ack"):
            if number <= self._newest:
                raise wire.WireError(f"request {number} after request {self._newest}")
            self._newest = number
            request = Request(self, header)
            self.requests[number] = request
            request.task = asyncio.get_running_loop().create_task(self._serve(request, body))

    async def _serve(self, request: Request, body: bytes) -> None:
        try:
            reply, data = await self.service.handle(request, body)
            self.send({"i": request.id, **reply}, data)
        except SlotError as error:
            self.send({"i": request.id, "err": error.to_wire()})
        except asyncio.CancelledError:
            self.send({"i": request.id, "err": SlotError("cancelled", "cancelled by the client").to_wire()})
        except Exception as error:  # noqa: BLE001 - a fault of the server is told to the client, which cannot go on
            self.send({"i": request.id, "err": SlotError("lost", f"server fault: {error!r}").to_wire()})
            self.service.report_fault(error)
        finally:
            self.requests.pop(request.id, None)

    def send(self, header: Header, body: bytes = b"") -> None:
        """Queue one frame."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(wire.encode(header, body))

    def close(self) -> None:
        """After what is queued has been sent."""
        if self.transport is not None:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Commands go on, so that the same request ids can be asked for again; streams and bridges end."""
        if self._deadline is not None:
            self._deadline.cancel()
        for request in self.requests.values():
            request.chunks.put_nowait(None)
        if self.authenticated:
            self.service.disconnected(self)
        if self.passing is not None:
            self.passing.close()
