"""A client's own line to the shell of a slot on the same machine.

The slot server lends it with a lease, and after a command that went through the server. Commands then take one hop each
way instead of two; what comes back is what the server would have answered. The server keeps its authority: it takes the
line back whenever something else wants the session, and a slot that is reset takes the other end along. What the line
cannot do, the server is asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sandbox_pool.server.serving import wire
from sandbox_pool.server.slots.channel import PACKET, Channel, Message
from sandbox_pool.server.slots.exec_messages import KEEPER_GRACE_S, ExecOutcome, begun, run_fields, run_message

Header = dict[str, Any]
Answer = tuple[Header, bytes]
OnEvent = Callable[[Header, bytes], None]
Cut = Callable[[int], Awaitable[Answer]]
"""Ask the server what became of a command, so many microseconds after it began, and have it ended if it still runs."""


class NotBegun(Exception):
    """The command did not start on this line, and may be sent through the server."""


class Line:
    """One command at a time."""

    def __init__(self, sock: socket.socket, lent: Mapping[str, Any], on_close: Callable[[], None]) -> None:
        self._cwd, self._workdir, self._logs = str(lent["cwd"]), str(lent["workdir"]), str(lent["logs"])
        self._names = itertools.count(1)
        self._on_close = on_close
        self._outcome: asyncio.Future[Message | None] | None = None
        """Of the command that runs; None when the line was cut, or nobody answers."""
        self._on_event: OnEvent | None = None
        self._channel = Channel(sock, self._on_message, self._closed)

    def takes(self, header: Header, body: bytes) -> bool:
        """Not while a command runs, and not what must be one message or be remembered by its id."""
        return self._outcome is None and "rid" not in header and len(body) < PACKET // 2

    def close(self) -> None:
        """Give it back."""
        self._channel.close()
        self._closed()

    def _closed(self) -> None:
        self._answered(None)
        self._on_close()

    def _answered(self, message: Message | None) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(message)

    def _on_message(self, message: Message) -> None:
        if message.op == "exit":
            self._answered(message)
        elif message.op == "alive" and self._on_event is not None:
            self._on_event({"ev": "alive", "s": message.number("us") / 1e6}, b"")

    async def run(self, header: Header, body: bytes, on_event: OnEvent | None, cut: Cut) -> Answer:
        """The answer to an exec request. Raises NotBegun, or SlotError for what the server would refuse."""
        split, log = int(header.get("command", len(body))), f"{self._logs}{next(self._names)}.log"
        stdin = body[split:] if header.get("stdin") else None
        fields, raw = run_message(body[:split], run_fields(header, log), stdin)
        if not self._channel.send_now("run", fields, raw):
            raise NotBegun
        loop = asyncio.get_running_loop()
        self._outcome, self._on_event = loop.create_future(), on_event
        began_s, timeout_ms = loop.time(), header.get("timeout_ms")
        overdue = loop.call_later(timeout_ms / 1000 + KEEPER_GRACE_S, self._answered, None) if timeout_ms else None
        try:
            try:
                message = await self._outcome
            except asyncio.CancelledError:
                await self._stop(header, log, began_s, cut)
                raise
            return await self._answer(message, header, log, began_s, cut)
        finally:
            if overdue is not None:
                overdue.cancel()
            self._outcome = self._on_event = None

    async def _answer(self, message: Message | None, header: Header, log: str, began_s: float, cut: Cut) -> Answer:
        if message is None:
            elapsed_us = int((asyncio.get_running_loop().time() - began_s) * 1e6)
            self.close()
            return await cut(elapsed_us)
        if not message.number("shell"):
            self.close()
        if not begun(message):
            raise NotBegun
        outcome = ExecOutcome(message, header, log, cwd=self._cwd, workdir=self._workdir)
        self._cwd = outcome.cwd
        return outcome.reply, outcome.body

    async def _stop(self, header: Header, log: str, began_s: float, cut: Cut) -> None:
        """The caller was cancelled: return when nothing of the command is left."""
        assert self._outcome is not None
        if not self._outcome.cancelled():  # it ended just now
            return
        self._outcome = asyncio.get_running_loop().create_future()
        self._channel.send_now("kill")
        on_event = self._on_event
        try:
            await asyncio.wait([self._outcome], timeout=KEEPER_GRACE_S)
        finally:
            if not self._outcome.done():
                self.close()
        try:
            reply, body = await self._answer(self._outcome.result(), header, log, began_s, cut)
        except NotBegun:
            return
        if header.get("tell_stopped") and on_event is not None:
            on_event({"ev": "stopped", **reply}, body)


class Lines:
    """The lines of one connection by slot and epoch. A line's descriptor and the answer that promises it come apart."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], Line] = {}
        self._promised: dict[int, tuple[tuple[int, int], Header]] = {}
        self._passed: dict[int, socket.socket] = {}
        self._passing: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    def of(self, header: Header) -> Line | None:
        """The line that a request may take."""
        return self._lines.get((header["slot"], header["epoch"]))

    async def open(self, path: str, token: str, connection: int) -> None:
        """The connection that descriptors come on. Without it everything goes through the server."""
        self._passing = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        hello = {"i": 0, "op": "hello", "protocol": wire.PROTOCOL, "token": token, "lines_of": connection}
        hello["most"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4  # most of them are for others
        try:
            await self._loop.sock_connect(sock, path)
            await self._loop.sock_sendall(sock, wire.encode(hello))
        except OSError:
            self.close()
            return
        self._loop.add_reader(sock.fileno(), self._descriptor)

    def _descriptor(self) -> None:
        assert self._passing is not None
        try:
            data, descriptors, _, _ = socket.recv_fds(self._passing, wire.LINE_NUMBER, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        if len(data) != wire.LINE_NUMBER:
            self.close()
        elif descriptors:  # else this process has no room for it
            self._passed[int.from_bytes(data, "big")] = socket.socket(fileno=descriptors[0])
            self._join(int.from_bytes(data, "big"))

    def promise(self, slot: int, epoch: int, lent: Header) -> None:
        """The server says that it lent a line."""
        self._promised[lent["number"]] = (slot, epoch), lent
        self._join(lent["number"])

    def _join(self, number: int) -> None:
        if number not in self._passed or number not in self._promised:
            return
        sock, (key, lent) = self._passed.pop(number), self._promised.pop(number)
        self._lines[key] = line = Line(sock, lent, lambda: self._forget(key, line))

    def _forget(self, key: tuple[int, int], line: Line) -> None:
        if self._lines.get(key) is line:
            del self._lines[key]

    def close(self) -> None:
        """Give all of them back."""
        if self._passing is not None:
            self._loop.remove_reader(self._passing.fileno())
            self._passing.close()
            self._passing = None
        for line in list(self._lines.values()):
            line.close()
        for sock in self._passed.values():
            sock.close()
        self._passed.clear()
