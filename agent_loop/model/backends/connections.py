"""HTTP/1.1 to one inference server: connections that are kept, each asking one thing at a time.

Hundreds of rollouts share one event loop, and a general HTTP client took a fifth of its time. Here httptools parses and
asyncio carries; redirects, cookies, proxies and compression, which no inference server needs, are left out.
"""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from typing import cast
from urllib.parse import SplitResult, urlsplit

import httptools

CONNECTIONS = 1024
"""Open at once to one server; more requests wait in line."""
CONNECT_WITHIN_S = 30.0
KEEP_IDLE_S = 15.0
"""Routers forget idle connections without a word, so an older one is not trusted with a request."""
OTHER_ADDRESS_AFTER_S = 0.25
"""When a name has several addresses, the next is tried beside the first after this time."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    status: int
    body: bytes
    location: str | None = None
    """Where a redirect points to."""
    keeps: bool = False
    """Whether the connection may be used again."""


class AnswerReader:
    """Puts one answer together, however it is cut up on the way."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._location: str | None = None
        self._is_framed = False
        """Whether the answer says where it ends; if not, it ends with the connection."""
        self._in_body = False
        self._answer: Answer | None = None

    def feed(self, data: bytes) -> Answer | None:
        """The answer, once it is whole; raises ConnectionError when this is not HTTP/1, or more than one answer."""
        if self._answer is not None:
            raise ConnectionError("the server sent more than its answer")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ConnectionError(f"the answer is not HTTP/1: {error}") from error
        return self._answer

    def end(self) -> Answer | None:
        """The answer, if the end of the connection makes it whole."""
        return self._made(keeps=False) if self._in_body and not self._is_framed else None

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header line."""
        lowered = name.lower()
        if lowered in (b"content-length", b"transfer-encoding"):
            self._is_framed = True
        elif lowered == b"location":
            self._location = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """All header lines."""
        self._in_body = True

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        """The end; what is below 200 only announces the answer."""
        if self._parser.get_status_code() < 200:
            self._is_framed = self._in_body = False
        elif self._answer is None:
            self._answer = self._made(keeps=self._parser.should_keep_alive())

    def _made(self, *, keeps: bool) -> Answer:
        return Answer(self._parser.get_status_code(), b"".join(self._chunks), self._location, keeps)


class Connection(asyncio.Protocol):
    """One connection. It is closed when an answer did not come whole: what comes later would belong to nobody."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.idle_since = self.loop.time()
        self._transport: asyncio.Transport | None = None
        self._reader = AnswerReader()
        self._asked: asyncio.Future[Answer] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can be asked."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self, request: bytes) -> Answer:
        """Send a request and wait for its answer; raises OSError when none comes."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection before it was asked")
        self._reader, self._asked = AnswerReader(), self.loop.create_future()
        answer = None
        try:
            self._transport.write(request)
            answer = await self._asked
            return answer
        finally:
            self._asked, self.idle_since = None, self.loop.time()
            if answer is None or not answer.keeps:
                self.close()

    def close(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """A piece of the answer; without a question there is none, and the connection is not trusted any more."""
        if self._asked is None:
            self.close()
            return
        try:
            self._settle(self._reader.feed(data))
        except ConnectionError as error:
            self._settle(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed, by whichever side."""
        cut_off = ConnectionResetError("the server closed the connection before its answer was whole")
        self._settle(exc or self._reader.end() or cut_off)

    def _settle(self, result: Answer | Exception | None) -> None:
        if self._asked is None or self._asked.done() or result is None:
            return
        if isinstance(result, Answer):
            self._asked.set_result(result)
        else:
            self._asked.set_exception(result)


def http_address(url: str, *, may_have_query: bool = False) -> SplitResult:
    """The parts of a server's address; raises ValueError when it is none."""
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname or (address.query and not may_have_query):
        raise ValueError(f"{url!r} is not an address like http://127.0.0.1:8000")
    return address


class Connections:
    """The connections to one server, whose address is from `http_address`."""

    def __init__(self, address: SplitResult) -> None:
        self._host = str(address.hostname)
        self._tls = ssl.create_default_context() if address.scheme == "https" else None
        self._port = address.port or (443 if self._tls else 80)
        self._idle: list[Connection] = []
        self._room = asyncio.Semaphore(CONNECTIONS)

    async def ask(self, request: bytes) -> Answer:
        """Send a request over a free connection, or a new one; raises OSError when no answer comes."""
        async with self._room:
            connection = self._free() or await self._connect()
            answer = await connection.ask(request)
        if connection.is_open:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        """Close those that are free; the others close when they are done."""
        while self._idle:
            self._idle.pop().close()

    def _free(self) -> Connection | None:
        """The one used last, because the server forgets it last."""
        loop = asyncio.get_running_loop()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.loop is loop and loop.time() - connection.idle_since < KEEP_IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_WITHIN_S):
            _, connection = await loop.create_connection(
                Connection, self._host, self._port, ssl=self._tls, happy_eyeballs_delay=OTHER_ADDRESS_AFTER_S
            )
        return connection
