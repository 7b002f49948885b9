"""Runs in a Daytona sandbox: starts the loader, and joins WebSockets on one port with the slot server's socket.

Daytona's preview addresses lead to HTTP servers alone, so a byte stream is the payload of a WebSocket. It travels as
text (`python3 -c`), stands alone and runs on Python 3.9. A second one finds the port taken and ends.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
HEAD_LIMIT = 1 << 16
BINARY, CLOSE, PING, PONG = 2, 8, 9, 10


def greet(peer: socket.socket) -> None:
    """Answer the request that opens a WebSocket; OSError when it is another one."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        data = peer.recv(1)
        if not data or len(head) > HEAD_LIMIT:
            raise ConnectionError("no request")
        head += data
    lines = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    fields = {name.strip().lower(): text.strip() for name, _, text in lines}
    key = fields.get(b"sec-websocket-key")
    if key is None:
        peer.sendall(b"HTTP/1.1 426 Upgrade Required\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        raise ConnectionError("not a WebSocket")
    accept = base64.b64encode(hashlib.sha1(key + MAGIC).digest())
    peer.sendall(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + accept + b"\r\n\r\n"
    )


def frame(kind: int, data: bytes) -> bytes:
    """One whole message as a server sends it."""
    size = len(data)
    if size < 126:
        return bytes((0x80 | kind, size)) + data
    if size < 1 << 16:
        return bytes((0x80 | kind, 126)) + size.to_bytes(2, "big") + data
    return bytes((0x80 | kind, 127)) + size.to_bytes(8, "big") + data


def exactly(peer: socket.socket, size: int) -> bytes:
    """So many bytes; ConnectionError when the peer ends before."""
    data = bytearray()
    while len(data) < size:
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionError("cut off")
        data += part
    return bytes(data)


def receive(peer: socket.socket) -> tuple[int, bytes]:
    """The next frame of a client: its kind, and its payload without the mask."""
    first, second = exactly(peer, 2)
    size = second & 0x7F
    if size > 125:
        size = int.from_bytes(exactly(peer, 2 if size == 126 else 8), "big")
    mask = exactly(peer, 4)
    data = exactly(peer, size)
    whole = mask * (size // 4 + 1)
    plain = int.from_bytes(data, "big") ^ int.from_bytes(whole[:size], "big")
    return first & 0x0F, plain.to_bytes(size, "big")


def serve(peer: socket.socket, path: str) -> None:
    """Copy both ways until either side ends."""
    server = socket.socket(socket.AF_UNIX)
    sending = threading.Lock()

    def send(kind: int, data: bytes) -> None:
        with sending:
            peer.sendall(frame(kind, data))

    def downwards() -> None:
        try:
            while data := server.recv(1 << 16):
                send(BINARY, data)
            send(CLOSE, b"")
        except OSError:
            pass  # the other direction ends as well
        peer.close()

    try:
        greet(peer)
        server.connect(path)
        threading.Thread(target=downwards, daemon=True).start()
        while True:
            kind, data = receive(peer)
            if kind == CLOSE:
                break
            if kind == PING:
                send(PONG, data)
            elif kind != PONG:
                server.sendall(data)
    except OSError:
        pass  # not listening yet, or cut off: the client tries again
    for each in (server, peer):
        with contextlib.suppress(OSError):  # it ended first
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def main() -> None:
    """The loader as a child; the sandbox is of no more use when it ends."""
    port, path, loader = int(sys.argv[1]), os.environ["HRL_BIND"][5:], sys.argv[2]
    listener = socket.create_server(("0.0.0.0", port))
    Path(path).parent.mkdir(mode=0o700, exist_ok=True)
    child = subprocess.Popen([sys.executable, "-c", loader, *sys.argv[3:]], stdin=subprocess.DEVNULL)
    threading.Thread(target=lambda: os._exit(child.wait() and 1), daemon=True).start()
    while True:
        peer, _ = listener.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=serve, args=(peer, path), daemon=True).start()


if __name__ == "__main__":
    main()
