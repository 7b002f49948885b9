"""Runs in the slot: starts an MCP server and carries its stdin and stdout over the bridge.

Reads the socket, its secret and the command from stdin. Ends as the server does; what the server writes to stderr is
this program's own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from typing import IO, Any

PIECE_CHARS = 300_000
"""As JSON no longer than the longest line of the bridge."""


class Link:
    """One connection to the agent's side: a question, an answer."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(job["socket"])
        self._answers = self._socket.makefile("rb")

    def ask(self, **request: Any) -> Any:
        self._socket.sendall(json.dumps(dict(request, token=job["token"])).encode("ascii") + b"\n")
        line = self._answers.readline()
        if not line.endswith(b"\n"):
            os._exit(0)  # the rollout is over
        return json.loads(line.decode("utf-8"))


def feed(stdin: IO[bytes]) -> None:
    """What the session says, to the server's stdin."""
    link = Link()
    while True:
        answer = link.ask(next=True)
        if "text" not in answer:
            stdin.close()
            return
        try:
            stdin.write((answer["text"] + "\n").encode("utf-8"))
            stdin.flush()
        except OSError:
            return  # the server has ended; the main thread says so


job = json.loads(sys.stdin.readline())
try:
    server = subprocess.Popen(job["command"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
except OSError as error:
    sys.exit(f"cannot start {job['command'][0]}: {error}")
threading.Thread(target=feed, args=(server.stdin,), daemon=True).start()
out = Link()
for line in server.stdout or ():
    text = line.decode("utf-8", "replace").rstrip("\n")
    for at in range(0, len(text), PIECE_CHARS):
        out.ask(text=text[at : at + PIECE_CHARS], more=at + PIECE_CHARS < len(text))
code = server.wait()
os._exit(code if code >= 0 else 128 - code)
