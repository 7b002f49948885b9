"""The way out of a slot whose spec has network rules: an HTTP proxy outside of it, at an address inside of it.

The slot has loopback only. The listening socket is made in the slot's network namespace by a process of the slot and
handed to the server, which takes connections from it: no address of the host is reachable, and no privilege is needed.
Names are resolved here, and the connection goes to the very address that was checked. Every host asked for is counted.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from ..faults import SlotError, TimedOut
from ..network_rules import Address, Rule, allowed, as_address, normal_host, parse_port, refusal, rules_of
from .file_worker import Worker
from .instance import Instance
from .zygote import BuildError

PORT = 31280
URL = f"http://127.0.0.1:{PORT}"
NO_PROXY = "localhost,127.0.0.1,::1"
ENVIRONMENT = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), URL),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), NO_PROXY),
}
MAX_CONNECTIONS = 64
MAX_HEAD = 64 << 10
MAX_HOSTS = 1000
"""Hosts that are recorded one by one; an agent can ask for any number of names."""
CHUNK = 64 << 10
HEAD_S, RESOLVE_S, CONNECT_S, IDLE_S = 30.0, 20.0, 20.0, 300.0
LINGER_S, LINGER_BYTES = 2.0, 4 << 20
MAX_ADDRESSES = 4
FAILED = (OSError, TimedOut)
"""Two things before Python 3.11."""
DEFAULT_MAX_MB = 4096
_TOKEN = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST = re.compile(rf"({_TOKEN}) (\S+) HTTP/1\.[01]")
_HEADER = re.compile(rf"({_TOKEN}):[ \t]*([^\x00\r\n]*?)[ \t]*")
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:/?#@\[\]\\]+)(?::(\d{1,5}))?")
_HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "upgrade", "host"}
_TEXT = bytes([9, 10, 13, *range(32, 127)])
_TLS = b"\x16"
_STATUS = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}
_resolvers = ThreadPoolExecutor(8, "resolve")
"""Apart from the threads that remove files: names that nobody answers for must not hold those up."""

Headers = list[tuple[str, str]]


class Refused(Exception):
    """A request that is not carried out; what the program in the slot is told."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Target(NamedTuple):
    """What a request asks for."""

    host: str
    port: int

    def text(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Proxy:
    """One slot's way out, for one life of the slot."""

    def __init__(self, rules: Sequence[Rule], max_bytes: int) -> None:
        self.rules = list(rules)
        self._left = max_bytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked: dict[tuple[str, int, str], dict[str, int]] = {}
        self._server: asyncio.AbstractServer | None = None

    async def start(self, listener: socket.socket) -> None:
        """Take connections from the slot."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=MAX_HEAD)

    def close(self) -> None:
        """Drop all connections."""
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()

    def report(self) -> list[dict[str, Any]]:
        """Every host asked for: how often, with which result, and the bytes that went either way."""
        return [
            {"host": host, "port": port, "allowed": not reason, "reason": reason, **counts}
            for (host, port, reason), counts in self._asked.items()
        ]

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _note(self, target: Target, reason: str = "") -> dict[str, int]:
        key = (target.host, target.port, reason)
        if key not in self._asked and len(self._asked) >= MAX_HOSTS:
            key = ("(others)", 0, reason)
        counts = self._asked.setdefault(key, {"count": 0, "sent_bytes": 0, "received_bytes": 0})
        counts["count"] += 1
        return counts

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except Refused as error:
            reason = _STATUS[error.status]
            head = f"HTTP/1.1 {error.status} {reason}\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"
            writer.write(f"{head}{error}\n".encode())
            await _linger(reader, writer)
        except (*FAILED, EOFError, ValueError, asyncio.LimitOverrunError):
            pass  # either side went away, stalled or sent no request: this connection ends, nothing else does
        finally:
            await _finish(writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_S)
        except asyncio.LimitOverrunError:
            raise Refused(400, f"the head of the request has more than {MAX_HEAD} bytes") from None
        method, url, headers = _parse_head(head.decode("latin-1"))
        if method == "CONNECT":
            await self._tunnel(_target(url, None), reader, writer)
            return
        if url[:7].lower() != "http://":
            raise Refused(400, "this is a proxy: ask it for http:// addresses, and CONNECT for https")
        authority, path = re.split(r"(?=[/?#])|\Z", url[7:], maxsplit=1)
        request = f"{method} {path if path.startswith('/') else '/' + path}"
        await self._forward(_target(authority, 80), request, authority, headers, reader, writer)

    async def _open(self, target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to an address of the host that was checked itself."""
        if not allowed(self.rules, target.host, target.port):
            self._note(target, "not allowed")
            raise Refused(403, f"{target.text()} is not on the list of hosts that this sandbox may reach")
        if self._left <= 0:
            self._note(target, "over the limit")
            raise Refused(403, "this sandbox has used up the bytes that it may send and receive")
        addresses = await self._resolve(target)
        public = [address for address in addresses if refusal(address) is None]
        if not public:
            self._note(target, "not public")
            raise Refused(403, f"{target.text()} is {refusal(addresses[0])}, which no sandbox may reach")
        for address in public[:MAX_ADDRESSES]:
            try:
                opened = asyncio.open_connection(str(address), target.port, limit=CHUNK)
                return await asyncio.wait_for(opened, CONNECT_S)
            except FAILED:
                continue
        self._note(target, "unreachable")
        raise Refused(502, f"{target.text()} cannot be reached")

    async def _resolve(self, target: Target) -> list[Address]:
        literal = as_address(target.host)
        if literal is not None:
            return [literal]
        loop = asyncio.get_running_loop()
        lookup = loop.run_in_executor(_resolvers, _look_up, target.host, target.port)
        try:
            return await asyncio.wait_for(lookup, RESOLVE_S)
        except (*FAILED, UnicodeError):
            self._note(target, "unknown name")
            raise Refused(502, f"the name {target.host} cannot be resolved") from None

    async def _tunnel(self, target: Target, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await self._open(target)
        counts = self._note(target)
        try:
            writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            await _both(
                self._from_slot(target, reader, to_there, counts),
                self._copy(there, writer, counts, "received_bytes"),
            )
        finally:
            await _finish(to_there)

    async def _from_slot(
        self, target: Target, reader: asyncio.StreamReader, to_there: asyncio.StreamWriter, counts: dict[str, int]
    ) -> None:
        """What the program sends. Many hosts share addresses: neither TLS nor HTTP may name one that is not allowed."""
        greeting = await asyncio.wait_for(_greeting(reader), IDLE_S)
        if is_request(greeting) and not allowed(self.rules, "any.name", target.port):
            await self._request_in_tunnel(target, greeting, reader, to_there, counts)
            return
        name = server_name(greeting)
        if name is not None:
            self._check_named(target, Target(name, target.port))
        self._spend(counts, "sent_bytes", len(greeting))
        to_there.write(greeting)
        await self._copy(reader, to_there, counts, "sent_bytes")

    def _check_named(self, target: Target, named: Target) -> None:
        if named.host != target.host and not allowed(self.rules, named.host, named.port):
            self._note(named, "not allowed")
            raise ConnectionAbortedError("another host than the one that the connection is for")

    async def _request_in_tunnel(
        self,
        target: Target,
        first: bytes,
        reader: asyncio.StreamReader,
        to_there: asyncio.StreamWriter,
        counts: dict[str, int],
    ) -> None:
        """As through the proxy itself: one request, for the host it names. What no proxy passes on ends the tunnel."""
        head = first.lstrip(b"\r\n")
        while not head.endswith(b"\r\n\r\n"):
            if not head.endswith(b"\r\n") or len(head) > MAX_HEAD:
                raise ConnectionAbortedError("not a request")
            head += await asyncio.wait_for(reader.readuntil(b"\n"), HEAD_S)
        try:
            method, path, headers = _parse_head(head.decode("latin-1"))
            length, chunked = _body_of(headers)
            hosts = [value for name, value in headers if name.lower() == "host"]
            if len(hosts) != 1 or not path.startswith(("/", "*")):
                raise ConnectionAbortedError("a request for no host, or for several")
            self._check_named(target, _target(hosts[0], target.port))
        except Refused as error:
            raise ConnectionAbortedError(str(error)) from None
        self._send_head(f"{method} {path}", hosts[0], headers, to_there)
        await self._send_body(length, chunked, reader, to_there, counts)

    async def _forward(
        self,
        target: Target,
        request: str,
        authority: str,
        headers: Headers,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """One request to the host it names, and nothing after it: a second one could name another host."""
        length, chunked = _body_of(headers)
        there, to_there = await self._open(target)
        counts = self._note(target)
        try:
            self._send_head(request, authority, headers, to_there)
            body = self._send_body(length, chunked, reader, to_there, counts)
            await _both(body, self._copy(there, writer, counts, "received_bytes"))
        finally:
            await _finish(to_there)

    @staticmethod
    def _send_head(request: str, authority: str, headers: Headers, to_there: asyncio.StreamWriter) -> None:
        lines = [f"{request} HTTP/1.1", f"Host: {authority}", *_end_to_end(headers), "Connection: close"]
        to_there.write("\r\n".join([*lines, "", ""]).encode("latin-1"))

    async def _send_body(
        self,
        length: int,
        chunked: bool,
        reader: asyncio.StreamReader,
        to_there: asyncio.StreamWriter,
        counts: dict[str, int],
    ) -> None:
        if chunked:
            await self._chunks(reader, to_there, counts)
        else:
            await self._exactly(length, reader, to_there, counts)

    def _spend(self, counts: dict[str, int], direction: str, size: int) -> None:
        counts[direction] += size
        self._left -= size
        if self._left < 0:
            raise ConnectionAbortedError("over the limit of bytes")

    async def _copy(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, counts: dict[str, int], direction: str
    ) -> None:
        while await asyncio.wait_for(self._piece(source, target, CHUNK, counts, direction), IDLE_S):
            pass
        if target.can_write_eof():
            target.write_eof()

    async def _piece(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        most: int,
        counts: dict[str, int],
        direction: str,
    ) -> int:
        data = await source.read(most)
        if data:
            self._spend(counts, direction, len(data))
            target.write(data)
            await target.drain()
        return len(data)

    async def _exactly(
        self, length: int, source: asyncio.StreamReader, target: asyncio.StreamWriter, counts: dict[str, int]
    ) -> None:
        while length:
            passed = await asyncio.wait_for(
                self._piece(source, target, min(length, CHUNK), counts, "sent_bytes"), IDLE_S
            )
            if not passed:
                raise ConnectionAbortedError("the body ended too early")
            length -= passed

    async def _chunks(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, counts: dict[str, int]) -> None:
        while True:
            line = await asyncio.wait_for(source.readuntil(b"\r\n"), IDLE_S)
            size = line[:-2].split(b";")[0].strip()
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,12}", size):
                raise ConnectionAbortedError("not a chunk")
            target.write(b"%x\r\n" % int(size, 16))
            if int(size, 16) == 0:
                target.write(b"\r\n")  # without trailers
                return
            await self._exactly(int(size, 16), source, target, counts)
            if await source.readexactly(2) != b"\r\n":
                raise ConnectionAbortedError("not a chunk")
            target.write(b"\r\n")


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Take what the program still sends: closed with something unread, a connection loses the answer as well."""

    async def take() -> None:
        left = LINGER_BYTES
        while left > 0 and (data := await reader.read(CHUNK)):
            left -= len(data)

    try:
        writer.write_eof()
        await asyncio.wait_for(take(), LINGER_S)
    except FAILED:
        pass


async def _finish(writer: asyncio.StreamWriter) -> None:
    """Close when all was taken. A program that does not take it holds one of its slot's connections, never more."""
    try:
        writer.close()
        await asyncio.wait_for(writer.wait_closed(), IDLE_S)
    except FAILED:
        pass
    finally:
        writer.transport.abort()


async def _both(one: Awaitable[None], other: Awaitable[None]) -> None:
    """Until both ways are done; the end of one by a fault ends the other."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _parse_head(text: str) -> tuple[str, str, Headers]:
    first, *lines = text[:-4].split("\r\n")
    request = _REQUEST.fullmatch(first)
    matches = [_HEADER.fullmatch(line) for line in lines]
    if request is None or None in matches:
        raise Refused(400, "this is not a request that a proxy can pass on")
    return request[1], request[2], [(match[1], match[2]) for match in matches if match is not None]


def _target(authority: str, default_port: int | None) -> Target:
    match = _AUTHORITY.fullmatch(authority)
    port = (match[2] or default_port) if match else None
    if match is None or port is None:
        raise Refused(400, f"{authority[:100]!r} is not a host with a port")
    try:
        return Target(normal_host(match[1]), parse_port(str(port)))
    except ValueError as error:
        raise Refused(400, str(error)) from None


def _look_up(host: str, port: int) -> list[Address]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    return list(dict.fromkeys(addresses))


def _body_of(headers: Headers) -> tuple[int, bool]:
    """How long the body of a request is, and whether it comes in chunks; one meaning, or none."""
    lengths = [value for name, value in headers if name.lower() == "content-length"]
    encodings = [value.lower() for name, value in headers if name.lower() == "transfer-encoding"]
    if encodings and (lengths or encodings != ["chunked"]):
        raise Refused(400, "the length of the body is not clear")
    if len(lengths) > 1 or any(not re.fullmatch(r"\d{1,18}", value) for value in lengths):
        raise Refused(400, "the length of the body is not clear")
    return int(lengths[0]) if lengths else 0, bool(encodings)


def _end_to_end(headers: Headers) -> list[str]:
    named = {
        word.strip().lower() for name, value in headers if name.lower() == "connection" for word in value.split(",")
    }
    dropped = (_HOP_BY_HOP | named) - {"content-length", "transfer-encoding"}
    return [
        f"{name}: {value}"
        for name, value in headers
        if name.lower() not in dropped and not name.lower().startswith("proxy-")
    ]


async def _greeting(reader: asyncio.StreamReader) -> bytes:
    """What the program says first: of TLS the whole first record, of text the first line that is not empty."""
    data = b""
    try:
        data = await reader.readexactly(1)
        if data == _TLS:
            data += await reader.readexactly(4)
            return data + await reader.readexactly(int.from_bytes(data[3:5], "big"))
        while not data.decode("latin-1").strip() and len(data) < MAX_HEAD:
            data += await reader.readexactly(1)
        if data[-1:] in _TEXT:
            data += await reader.readuntil(b"\n")
    except asyncio.IncompleteReadError as ended:
        data += ended.partial
    return data


def is_request(greeting: bytes) -> bool:
    """Whether a server could take this line for a request by HTTP, of whatever version.

    Words end at what any server takes for a space: some split lines of text, where more bytes are spaces. A greeting of
    TLS is none, though one in a hundred has random bytes that read like one; its own name is checked.
    """
    if greeting[:1] == _TLS:
        return False
    words = greeting.decode("latin-1").upper().split()
    return len(words) > 1 and (words[-1].startswith("HTTP/") or words[1][:1] in "/*" or "://" in words[1])


def server_name(greeting: bytes) -> str | None:
    """The host that a TLS greeting names; None without one, empty when it names several or cannot be read."""
    if greeting[:1] != _TLS:
        return None
    try:
        fields = _Fields(greeting[5 : 5 + int.from_bytes(greeting[3:5], "big")])
        if fields.take(1) != b"\x01":
            return ""
        hello = _Fields(fields.sized(3))
        hello.take(34)
        for width in (1, 2, 1):  # session, ciphers, compression
            hello.sized(width)
        extensions, found = _Fields(hello.sized(2)) if hello.left else _Fields(b""), None
        while extensions.left:
            kind, content = extensions.take(2), _Fields(extensions.sized(2))
            if kind == b"\0\0":
                names = _Fields(content.sized(2))
                if found is not None or names.take(1) != b"\0":
                    return ""
                found = normal_host(names.sized(2).decode("ascii"))
                if names.left:
                    return ""
    except (EOFError, ValueError):
        return ""
    return found


class _Fields:
    """Reads fields of fixed and of stated length."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def left(self) -> int:
        return len(self._data)

    def take(self, size: int) -> bytes:
        if len(self._data) < size:
            raise EOFError
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def sized(self, width: int) -> bytes:
        return self.take(int.from_bytes(self.take(width), "big"))


async def open_proxy(instance: Instance, network: str | Mapping[str, Any], own_network: bool) -> None:
    """Give a new slot its way out, if its spec asks for one that is not the host's own."""
    try:
        rules = rules_of(network)
    except ValueError as error:
        raise BuildError(str(error)) from None
    if rules is None:
        return
    if not own_network:
        raise BuildError("network rules need slots with a network of their own, which this level of isolation lacks")

    def start(values: list[tuple[str, Any]], fd: int) -> None:
        instance.control.send("file", values, fds=[fd])

    with Worker(start, [("do", "listen"), ("port", PORT)], "", instance.check_still_alive) as worker:
        fd = await worker.receive_fd()
        await worker.status()
    if fd is None:
        raise SlotError("lost", "the slot gave no socket")
    max_mb = network.get("max_mb") if isinstance(network, Mapping) else None
    proxy = Proxy(rules, (max_mb or DEFAULT_MAX_MB) << 20)
    await proxy.start(socket.socket(fileno=fd))
    instance.proxy = proxy
    instance.ended.add_done_callback(lambda _: proxy.close())
