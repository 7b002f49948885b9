"""Tools for scripts run by execute_code. Every function sends one call to the agent and returns its result as a dict.

Safe to use from several threads: each has a connection of its own.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")
_agent: dict[str, str] = {}
_local = threading.local()


def json_parse(text: str) -> Any:
    """Parse JSON that may hold raw control characters or begin with a byte order mark."""
    return json.loads(text[1:] if text.startswith("\ufeff") else text, strict=False)


def shell_quote(text: str) -> str:
    """Quote a string for use in a terminal() command."""
    return shlex.quote(text)


def retry(fn: Callable[[], _T], max_attempts: int = 3, delay: float = 2) -> _T:
    """Call fn until it does not raise, waiting delay, 2 * delay, 4 * delay ... seconds in between."""
    for attempt in range(max_attempts - 1):
        try:
            return fn()
        except Exception:  # whatever it is, that is what retry is for
            time.sleep(delay * 2**attempt)
    return fn()


def _send(request: dict[str, Any]) -> dict[str, Any]:
    if getattr(_local, "pid", None) != os.getpid():
        # First call of this thread, or of a forked child, which must not share its parent's connection.
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(_agent["socket"])
        _local.connection, _local.stream, _local.pid = connection, connection.makefile("rb"), os.getpid()
    _local.connection.sendall(json.dumps(dict(request, token=_agent["token"])).encode("ascii") + b"\n")
    line = _local.stream.readline()
    if not line.endswith(b"\n"):
        _local.pid = None
        raise RuntimeError("the agent has closed the connection")
    reply = json.loads(line.decode("utf-8"))
    return reply if isinstance(reply, dict) else {"result": reply}


def _exchange(request: dict[str, Any]) -> dict[str, Any]:
    reply = _send(request)
    if "piece" not in reply:
        return reply
    # A result that is too long for one frame comes in pieces.
    pieces = [reply["piece"]]
    while reply.get("more"):
        reply = _send({"more": reply["more"]})
        pieces.append(reply["piece"])
    whole = json.loads("".join(pieces))
    return whole if isinstance(whole, dict) else {"result": whole}


def _hello() -> None:
    _exchange({"hello": list(sys.version_info[:3])})


def _call(name: str, **arguments: Any) -> Any:
    given = {key: value for key, value in arguments.items() if value is not None}
    return _exchange({"tool": name, "args": given})
