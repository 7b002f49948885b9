"""A unix socket inside a slot whose lines are answered by the client: programs in the sandbox can call out of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from typing import Any

from ..faults import SlotError
from ..slots.instance import Instance
from ..slots.slots import Slot
from .file_requests import open_worker
from .peer import Reply, Request

MAX_LINE = 4 << 20
MAX_CONNECTIONS = 32
MAX_CALLS = 32
"""Under way at a time. Together they bound what one slot can make the server hold, in memory and descriptors."""
_FRAME = struct.Struct("!QQ")
"""Call number and length of an answer."""


class Bridge:
    """Accepts connections, passes each line to the client, writes each answer back to where its line came from."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Semaphore(MAX_CALLS)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A program in the slot connected; one too many is turned away."""
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._start(self._lines(reader, writer))

    def _start(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _lines(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lock = asyncio.Lock()
        pending: set[asyncio.Task[None]] = set()
        try:
            while True:
                line = await reader.readline()
                if not line.endswith(b"\n"):
                    break
                await self._gate.acquire()  # until then nothing more is read from this connection
                task = asyncio.get_running_loop().create_task(self._answer(line, writer, lock))
                pending.add(task)
                task.add_done_callback(pending.discard)
                task.add_done_callback(lambda _: self._gate.release())
            await asyncio.gather(*pending)
        except (ConnectionError, ValueError):
            pass  # the program went away or sent a line beyond the limit: its connection ends, nothing else does
        finally:
            for task in pending:
                task.cancel()
            writer.close()

    async def _answer(self, line: bytes, writer: asyncio.StreamWriter, lock: asyncio.Lock) -> None:
        number = next(self._numbers)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[number] = future
        self._request.push("call", line, call=number)
        try:
            reply = await future
        finally:
            self._calls.pop(number, None)
        async with lock:
            with contextlib.suppress(ConnectionError):
                writer.write(reply if reply.endswith(b"\n") else reply + b"\n")
                await writer.drain()

    async def answers(self) -> None:
        """Answers from the client, in pieces of any size. Ends with the client's stream."""
        received = bytearray()
        while True:
            data = await self._request.next_chunk()
            if data is None:
                return
            received += data
            while len(received) >= _FRAME.size:
                number, length = _FRAME.unpack_from(received)
                if len(received) < _FRAME.size + length:
                    break
                self._deliver(number, bytes(received[_FRAME.size : _FRAME.size + length]))
                del received[: _FRAME.size + length]

    def _deliver(self, number: int, reply: bytes) -> None:
        future = self._calls.get(number)
        if future is not None and not future.done():  # else the program that asked went away
            future.set_result(reply)

    def close(self) -> None:
        """Drop all connections."""
        for task in list(self._tasks):
            task.cancel()


async def open_bridge(_slot: Slot, instance: Instance, request: Request, _body: bytes) -> Reply:
    """Serve until the client ends its stream, the lease ends, or the client goes away."""
    with open_worker(instance, request, "listen") as worker:
        fd = await worker.receive_fd()
        await worker.status()
    if fd is None:
        raise SlotError("lost", "the slot gave no socket")
    bridge = Bridge(request)
    server = await asyncio.start_unix_server(bridge.accept, sock=socket.socket(fileno=fd), limit=MAX_LINE)
    request.push("listening")
    answers = asyncio.ensure_future(bridge.answers())
    try:
        await asyncio.wait([answers, instance.ended], return_when=asyncio.FIRST_COMPLETED)
    finally:
        answers.cancel()
        server.close()
        bridge.close()
        await _remove_socket(instance, request)
    return {}, b""


async def _remove_socket(instance: Instance, request: Request) -> None:
    if instance.lost:
        return
    with contextlib.suppress(SlotError), open_worker(instance, request, "remove") as worker:
        await worker.status()
