"""Client's end of a bridge: lines that programs in the slot send to a socket there, answered here concurrently."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox_pool.client.connection import Connection, Header

log = logging.getLogger(__name__)

_FRAME = struct.Struct("!QQ")
"""Call number and length: an answer may be sent in several pieces."""


class Bridge:
    """One `serve` request for as long as it is open."""

    def __init__(self, connection: Connection, header: Header, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._connection = connection
        self._header = header
        self._handler = handler
        self._answers: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._calls: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[object] | None = None
        self._listening: asyncio.Future[None] | None = None

    async def open(self) -> None:
        """Until the socket in the slot is listening."""
        loop = asyncio.get_running_loop()
        self._listening = loop.create_future()
        self._task = loop.create_task(
            self._connection.call(self._header, on_event=self._on_event, chunks=self._stream())
        )
        racing: list[asyncio.Future[Any]] = [self._listening, self._task]
        await asyncio.wait(racing, return_when=asyncio.FIRST_COMPLETED)
        if not self._listening.done():
            await self._task

    def _on_event(self, header: Header, body: bytes) -> None:
        if header["ev"] == "listening":
            if self._listening is not None and not self._listening.done():
                self._listening.set_result(None)
        elif header["ev"] == "call":
            task = asyncio.get_running_loop().create_task(self._answer(header["call"], body))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _answer(self, number: int, line: bytes) -> None:
        """Always answers: the program in the slot waits for it."""
        reply = _failed("the call was cancelled")
        try:
            reply = await self._handler(line.rstrip(b"\n"))
        except Exception as error:  # the log has the whole of it; the slot is told no more than its kind
            log.exception("the handler of a bridge failed")
            reply = _failed(f"the call failed outside the sandbox: {type(error).__name__}")
        finally:
            self._answers.put_nowait(_FRAME.pack(number, len(reply)) + reply)

    async def _stream(self) -> AsyncIterator[bytes]:
        while (answer := await self._answers.get()) is not None:
            yield answer

    async def close(self) -> None:
        """End the stream; the server closes and removes the socket."""
        for call in list(self._calls):
            call.cancel()
        self._answers.put_nowait(None)
        if self._task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


def _failed(reason: str) -> bytes:
    return json.dumps({"error": reason}).encode()
