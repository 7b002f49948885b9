"""Runs in a container, started by an exec of the engine: joins its stdin and stdout with the slot server's socket.

It travels as text (`python3 -c`), so it stands alone and runs on Python 3.9. It ends when either side closes.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time


def connect(path: str, within_s: float) -> socket.socket:
    """The loader, the container's first process, may still be starting."""
    deadline_s = time.monotonic() + within_s
    while True:
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect(path)
            return peer
        except OSError:
            peer.close()
            if time.monotonic() > deadline_s:
                sys.exit(f"nothing listens at {path}")
            time.sleep(0.02)


def upwards(peer: socket.socket) -> None:
    """Stdin to the server. When it ends, so does the connection: the pool is gone."""
    try:
        while data := os.read(0, 1 << 16):
            peer.sendall(data)
    except OSError:
        pass  # the server closed: the other direction ends the process
    os._exit(0)


def main() -> None:
    """Copy both ways."""
    peer = connect(sys.argv[1], float(sys.argv[2]))
    threading.Thread(target=upwards, args=(peer,), daemon=True).start()
    while data := peer.recv(1 << 16):
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]
    os._exit(0)


if __name__ == "__main__":
    main()
