"""File requests: each is done by a worker process inside the slot; here its stream is relayed to the client."""

from __future__ import annotations

import array
import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..faults import SlotError, file_error
from ..serving.wire import CHUNK

Fields = Sequence[tuple[str, Any]]


class Worker:
    """Our end of a worker's stream socket."""

    def __init__(
        self, start: Any, fields: Fields, path: str, check_slot: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.path = path
        self._check_slot = check_slot
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours.setblocking(False)
        self._sock = ours
        self._buffer = b""
        try:
            start([*fields, ("path", path)], theirs.fileno())
        finally:
            theirs.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    async def status(self) -> str:
        """The next status line; an error line becomes an exception."""
        while b"\n" not in self._buffer:
            data = await self._loop.sock_recv(self._sock, CHUNK)
            if not data:
                raise await self.gone()
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        word, _, rest = line.decode().partition(" ")
        if word != "ok":
            raise file_error(int(rest), self.path)
        return rest

    async def gone(self) -> SlotError:
        """The worker ended, or never began: with its slot, or because the slot has no memory or process left."""
        if self._check_slot is not None:
            await self._check_slot()
            return file_error(errno.EAGAIN, self.path)
        return SlotError("lost", "the slot ended while a file request was under way")

    async def read(self) -> bytes:
        """Some bytes of the worker's data; empty at its end."""
        if self._buffer:
            data, self._buffer = self._buffer, b""
            return data
        return await self._loop.sock_recv(self._sock, CHUNK)

    async def read_all(self, limit: int) -> bytes:
        """All of the worker's data; more than `limit` bytes are refused."""
        data = bytearray()
        while piece := await self.read():
            data += piece
            if len(data) > limit:
                raise file_error(errno.EFBIG, self.path)
        return bytes(data)

    async def send(self, data: bytes) -> bool:
        """Pass data on; False when the worker has stopped reading, its status then says why."""
        try:
            await self._loop.sock_sendall(self._sock, data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive_fd(self) -> asyncio.Future[int | None]:
        """The descriptor that comes with the next status line, if there is one."""
        future: asyncio.Future[int | None] = self._loop.create_future()

        def readable() -> None:
            self._loop.remove_reader(self._sock.fileno())
            try:
                data, control, _, _ = self._sock.recvmsg(4096, 64, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                future.set_exception(error)
                return
            fds = array.array("i")
            for _, _, payload in control:
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
            self._buffer += data
            future.set_result(fds[0] if fds else None)

        self._loop.add_reader(self._sock.fileno(), readable)
        return future
