"""What a slot is made of, and the messages that say so."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..slots.channel import PACKET, encode_message


@dataclass
class Request:
    """A message from the server; keys may repeat."""

    op: str
    pairs: list[tuple[str, str]]
    raw: bytes
    fds: list[int] = field(default_factory=list)

    def get(self, key: str, otherwise: str = "") -> str:
        """The first value of a key."""
        return next((value for name, value in self.pairs if name == key), otherwise)

    def all(self, key: str) -> list[str]:
        """Every value of a key."""
        return [value for name, value in self.pairs if name == key]

    def number(self, key: str, otherwise: int = 0) -> int:
        """An integer value."""
        text = self.get(key)
        return int(text) if text else otherwise


@dataclass
class SlotConfig:
    """Fields of a `create` message."""

    hostname: str
    workdir: str
    home: str
    root: str
    upper_size: str
    layers: list[str]
    parts: list[str]
    cgroups: list[str]
    namespaces: bool
    user_ns: bool
    net_ns: bool
    idmap: bool
    seccomp: bool
    landlock: bool
    no_inet: bool
    uid_base: int
    uid_count: int
    run_uid: int
    max_processes: int
    max_memory_bytes: int

    @classmethod
    def read(cls, request: Request) -> SlotConfig:
        """From the server's request."""
        return cls(
            hostname=request.get("hostname"),
            workdir=request.get("workdir"),
            home=request.get("home"),
            root=request.get("root"),
            upper_size=request.get("upper_size"),
            layers=request.all("layer"),
            parts=request.all("part"),
            cgroups=request.all("cgroup"),
            namespaces=bool(request.number("namespaces")),
            user_ns=bool(request.number("user_ns")),
            net_ns=bool(request.number("net_ns")),
            idmap=bool(request.number("idmap")),
            seccomp=bool(request.number("seccomp")),
            landlock=bool(request.number("landlock")),
            no_inet=bool(request.number("no_inet")),
            uid_base=request.number("uid_base"),
            uid_count=request.number("uid_count", 1),
            run_uid=request.number("run_uid"),
            max_processes=request.number("max_processes"),
            max_memory_bytes=request.number("max_memory_bytes"),
        )


def receive(sock: socket.socket) -> Request | None:
    """The next message; None when the other side is gone."""
    fds: list[int] = []
    data = _packet(sock, fds)
    if len(data) < 4:
        return None
    (total,) = struct.unpack_from("<I", data)
    payload = data[4:]
    while len(payload) < total:
        more = _packet(sock, fds)
        if not more:
            return None
        payload += more
    head, _, raw = payload.partition(b"\0\0")
    op, *fields = os.fsdecode(head).split("\0")
    pairs = [(key, value) for key, _, value in (text.partition("=") for text in fields)]
    return Request(op, pairs, raw, fds)


def _packet(sock: socket.socket, fds: list[int]) -> bytes:
    try:
        data, control, _, _ = sock.recvmsg(PACKET, 1024, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return b""
    for _, _, payload in control:
        received = array.array("i")
        received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
        fds.extend(received)
    return data


def send(
    sock: socket.socket,
    op: str,
    raw: bytes = b"",
    *,
    fds: Sequence[int] = (),
    fields: Mapping[str, object] | None = None,
) -> bool:
    """Send a message; False when the other side is gone."""
    values = [(key, str(int(v)) if isinstance(v, bool) else str(v)) for key, v in (fields or {}).items()]
    data = encode_message(op, values, raw)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        for start in range(0, len(data), PACKET):
            sock.sendmsg([data[start : start + PACKET]], rights if start == 0 else [], socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True
