"""Runs in a Modal sandbox, one per connection of the pool: joins its stdin and stdout with the slot server's socket.

It travels as text (`python3 -c`), so it stands alone and runs on Python 3.9; the pool's end imports the blocks from
here.

    relay unix:/path|tcp:host:port SILENCE_S CONNECT_S

Both ways the bytes travel in blocks: u32 length, u32 CRC-32 of everything sent so far that way, data (numbers are
big-endian, a block has at most 256 KiB). A byte that is lost, doubled, swapped or put in by somebody else is found
before anything of its block is passed on. An empty block is a heartbeat: the relay sends one when it is connected,
and one for each that it gets.

It ends when its stdin or the server's connection ends, and when nothing came for SILENCE_S: the other end sends
heartbeats more often than that, so it must be dead. Errors go to stderr; stdout carries blocks only.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import threading
import time
import zlib
from typing import NoReturn

HEADER = struct.Struct("!II")
MAX_BLOCK = 256 << 10
LINGER_S = 5.0
RETRY_S = 0.02


class Damaged(Exception):
    """The bytes that arrived are not the bytes that were sent."""


class Packer:
    """Blocks of one direction, to be sent in this order."""

    def __init__(self) -> None:
        self._sum = 0

    def pack(self, data: bytes) -> bytes:
        """The next block; without data it is a heartbeat."""
        self._sum = zlib.crc32(data, self._sum)
        return HEADER.pack(len(data), self._sum) + data


class Unpacker:
    """Takes blocks out of a stream and checks that it is complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._sum = 0
        self._passed = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; return the data of the blocks that they complete."""
        self._buffer += data
        blocks = []
        while len(self._buffer) >= HEADER.size:
            length, wanted = HEADER.unpack_from(self._buffer)
            end = HEADER.size + length
            if length > MAX_BLOCK:
                raise Damaged(f"what follows the first {self._passed} bytes is not a block")
            if len(self._buffer) < end:
                break
            block = bytes(self._buffer[HEADER.size : end])
            self._sum = zlib.crc32(block, self._sum)
            if self._sum != wanted:
                raise Damaged(f"the block of {length} bytes after {self._passed} bytes is not the one that was sent")
            del self._buffer[:end]
            self._passed += length
            blocks.append(block)
        return blocks


class Writer:
    """Writes blocks to stdout. Anything else that is printed goes to stderr from now on."""

    def __init__(self) -> None:
        self._descriptor = os.dup(1)
        os.dup2(2, 1)
        self._packer = Packer()
        self._lock = threading.Lock()

    def send(self, data: bytes) -> None:
        """Send one block."""
        with self._lock:
            rest = memoryview(self._packer.pack(data))
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


def fail(reason: str) -> NoReturn:
    """End now, whatever the other thread waits for."""
    os.write(2, reason.encode() + b"\n")
    os._exit(1)


def connect(target: str, connect_s: float) -> socket.socket:
    """The server's socket; retried for `connect_s`."""
    kind, _, rest = target.partition(":")
    deadline = time.monotonic() + connect_s
    while True:
        try:
            if kind == "tcp":
                host, _, port = rest.rpartition(":")
                server = socket.create_connection((host, int(port)), max(0.1, deadline - time.monotonic()))
                server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            else:
                server = socket.socket(socket.AF_UNIX)
                server.connect(rest)
            server.settimeout(None)
            return server
        except OSError as error:
            if time.monotonic() >= deadline:
                fail(f"nothing listens at {target}: {error}")
            time.sleep(RETRY_S)


def feed(server: socket.socket, writer: Writer, silence_s: float) -> None:
    """From stdin to the server; in a thread, so that neither way ever waits for the other."""
    blocks = Unpacker()
    try:
        while True:
            data = os.read(0, MAX_BLOCK)
            signal.setitimer(signal.ITIMER_REAL, silence_s)
            if not data:
                break
            for block in blocks.feed(data):
                if block:
                    server.sendall(block)
                else:
                    writer.send(b"")
        signal.setitimer(signal.ITIMER_REAL, LINGER_S)
        server.shutdown(socket.SHUT_WR)
    except (Damaged, OSError) as error:
        fail(f"from the pool to the server: {error}")


def main() -> None:
    """Relay one connection until either end closes it."""
    target, silence_s, connect_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    signal.signal(signal.SIGALRM, lambda *_: fail("nothing came from the pool for too long"))
    signal.setitimer(signal.ITIMER_REAL, silence_s)
    writer = Writer()
    server = connect(target, connect_s)
    try:
        writer.send(b"")
        threading.Thread(target=feed, args=(server, writer, silence_s), daemon=True).start()
        while True:
            data = server.recv(MAX_BLOCK)
            if not data:
                os._exit(0)
            writer.send(data)
    except OSError as error:
        fail(f"from the server to the pool: {error}")


if __name__ == "__main__":
    main()
