"""Messages to the helper over SOCK_SEQPACKET: never blocks, because a slot may stop the process at the other end."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Union

PACKET = 65536
MAX_MESSAGE = 256 << 20
"""No helper sends more; what is at the other end may have been taken over."""
Value = Union[str, int, bytes]  # noqa: UP007 - evaluated, and Python 3.9 has no other way
Fields = Sequence[tuple[str, Value]]


class Message:
    """One received message: operation, fields, raw bytes."""

    __slots__ = ("fields", "op", "raw")

    def __init__(self, op: str, fields: dict[str, str], raw: bytes) -> None:
        self.op = op
        self.fields = fields
        self.raw = raw

    def number(self, key: str, otherwise: int = 0) -> int:
        """An integer field."""
        text = self.fields.get(key)
        return otherwise if text is None else int(text)


def encode_fields(fields: Fields) -> bytes:
    """`NUL key=value` for each field. Values cannot hold NUL."""
    parts = []
    for key, value in fields:
        data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")
        if b"\0" in data:
            raise ValueError(f"{key} holds a NUL byte")
        parts.append(b"\0" + key.encode() + b"=" + data)
    return b"".join(parts)


def encode_message(op: str, fields: Fields | bytes = (), raw: bytes = b"") -> bytes:
    """`op NUL key=value NUL ... NUL raw` behind a little-endian u32 length; fields may be encoded already."""
    encoded = fields if isinstance(fields, bytes) else encode_fields(fields)
    payload = op.encode() + encoded + b"\0\0" + raw
    return struct.pack("<I", len(payload)) + payload


def decode_message(data: bytes) -> Message:
    """The inverse of `encode_message` for what the helper sends."""
    head, _, raw = data.partition(b"\0\0")
    op, *fields = head.rstrip(b"\0").decode("utf-8", "surrogateescape").split("\0")
    pairs = dict(field.partition("=")[::2] for field in fields)
    return Message(op, pairs, raw)


class Channel:
    """Server's end of a message socket, driven by the event loop."""

    def __init__(
        self, sock: socket.socket, on_message: Callable[[Message], None], on_close: Callable[[], None]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        self._on_message = on_message
        self._on_close = on_close
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._partial: bytearray | None = None
        self._expected = 0
        self.closed = False
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._readable)

    def send(self, op: str, fields: Fields | bytes = (), raw: bytes = b"", fds: Iterable[int] = ()) -> None:
        """Queue a message; `fds` are duplicated as needed, the caller may close its own."""
        data = encode_message(op, fields, raw)
        copies = list(fds)
        for start in range(0, len(data), PACKET):
            packet = data[start : start + PACKET]
            attached = copies if start == 0 else []
            if self._unsent or not self._send_packet(packet, attached):
                self._unsent.append((packet, [os.dup(fd) for fd in attached]))
                if len(self._unsent) == 1:
                    self._loop.add_writer(self._fd, self._writable)

    def send_now(self, op: str, fields: Fields = (), raw: bytes = b"") -> bool:
        """Send one packet at once, or nothing: False when it has no room, or nobody is there to take it."""
        data = encode_message(op, fields, raw)
        if self.closed or self._unsent or len(data) > PACKET:
            return False
        try:
            self._sock.send(data, socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def _send_packet(self, packet: bytes, fds: list[int]) -> bool:
        """False when the socket is full; a peer that is gone shows up as end of file on the reading side."""
        if self.closed:
            return True
        try:
            if fds:
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))
                self._sock.sendmsg([packet], [rights], socket.MSG_NOSIGNAL)
            else:
                self._sock.send(packet, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def _writable(self) -> None:
        while self._unsent:
            packet, fds = self._unsent[0]
            if not self._send_packet(packet, fds):
                return
            self._unsent.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._fd)

    def _readable(self) -> None:
        while not self.closed:
            try:
                # Not recvmsg: descriptors that a slot's process might attach are dropped by the kernel.
                data = self._sock.recv(PACKET)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lost()
                return
            self._packet(data)
            if len(data) < PACKET and self._partial is None:
                return

    def _packet(self, data: bytes) -> None:
        if self._partial is None:
            self._expected = int.from_bytes(data[:4], "little")
            if len(data) - 4 == self._expected:  # the common case: one packet, one message
                self._on_message(decode_message(data[4:]))
                return
            if self._expected > MAX_MESSAGE:
                self._lost()
                return
            self._partial = bytearray(data[4:])
        else:
            self._partial += data
        if len(self._partial) >= self._expected:
            message, self._partial = bytes(self._partial), None
            self._on_message(decode_message(message))

    def _lost(self) -> None:
        if not self.closed:
            self.close()
            self._on_close()

    def close(self) -> None:
        """Let go of the socket without telling `on_close`."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._fd)
        if self._unsent:
            self._loop.remove_writer(self._fd)
        for _, fds in self._unsent:
            for fd in fds:
                os.close(fd)
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._sock.close()


def message_pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair of message sockets: ours and the helper's."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
