"""Calls both ways between two processes of one program, over a socket pair that nobody else can reach.

What is sent is pickled, so either side can have the other run anything: it is for processes that trust each other. A
call that is cancelled is cancelled at the other side too, and ends when that says so.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
import struct
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from sandbox_pool.client.connection import TaskSet

LENGTH = struct.Struct("!Q")
READ_AHEAD = 1 << 22
CANCEL_TIMEOUT_S = 15.0
"""A process that does not answer a cancel for so long hangs, and is not waited for."""

Handle = Callable[..., Awaitable[Any]]
"""name, arguments -> the answer."""


class OtherEnded(ConnectionError):
    """The process at the other end is gone."""


class Channel:
    """One end. `open` it, `call` the other end, and answer its calls through `handle`."""

    def __init__(self, handle: Handle) -> None:
        self.ended = asyncio.Event()
        """Set when the other process has ended, or this end was closed."""
        self._handle = handle
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._handlers: dict[int, asyncio.Task[None]] = {}
        self._tasks = TaskSet()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def open(self, end: socket.socket) -> None:
        """Take over one end of a socket pair."""
        reader, self._writer = await asyncio.open_unix_connection(sock=end, limit=READ_AHEAD)
        self._reading = asyncio.get_running_loop().create_task(self._read(reader))

    async def call(self, name: str, *arguments: Any, reclaim: Callable[[Any], object] | None = None) -> Any:
        """The other end's answer, or its exception. An answer that comes although this was cancelled is reclaimed."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        try:
            self._send("call", number, name, arguments)
            assert self._writer is not None
            await self._writer.drain()
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._write(_packed("cancel", number))
            await asyncio.wait([answer], timeout=CANCEL_TIMEOUT_S)
            if answer.done() and answer.exception() is None and reclaim is not None:
                reclaim(answer.result())
            raise
        finally:
            del self._calls[number]
            answer.cancel()

    def post(self, name: str, *arguments: Any) -> None:
        """A call whose answer nobody waits for. It is begun before any later call."""
        self._send("call", -1, name, arguments)

    def _send(self, *message: Any) -> None:
        if self.ended.is_set():
            raise OtherEnded("the other process has ended")
        self._write(_packed(*message))

    def _write(self, data: bytes) -> None:
        if self._writer is not None and not self.ended.is_set():
            self._writer.write(LENGTH.pack(len(data)))
            self._writer.write(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                self._take(*pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self._over()

    def _take(self, kind: str, number: int, *rest: Any) -> None:
        if kind == "call":
            task = self._tasks.start(self._answer(number, *rest))
            if number >= 0:
                self._handlers[number] = task
                task.add_done_callback(lambda _: self._handlers.pop(number, None))
        elif kind == "cancel":
            if number in self._handlers:
                # Not at once: a task that is cancelled before it ever ran cannot answer.
                asyncio.get_running_loop().call_soon(self._handlers[number].cancel)
        elif number in self._calls and not self._calls[number].done():
            if kind == "error":
                self._calls[number].set_exception(rest[0])
                self._calls[number].exception()
            else:
                self._calls[number].set_result(rest[0])

    async def _answer(self, number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            data = _packed("answer", number, await self._handle(name, *arguments))
        except asyncio.CancelledError:
            data = _packed("error", number, OtherEnded("cancelled"))
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is raised where the answer is waited for
            data = _packed("error", number, _portable(error))
        finally:
            if number >= 0:
                self._write(data)

    def _over(self) -> None:
        self.ended.set()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(OtherEnded("the other process has ended"))
                answer.exception()
        self._tasks.cancel()
        if self._writer is not None:
            self._writer.close()

    async def close(self) -> None:
        """Hang up, and wait for what was being answered."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        await self._tasks.finish()


def _packed(*message: Any) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def _portable(error: Exception) -> Exception:
    """The exception as it can be sent, with where it was raised."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - a foreign class that cannot be made again: its text is what is left
        return RuntimeError("".join(traceback.format_exception_only(error)).strip())
    return error
