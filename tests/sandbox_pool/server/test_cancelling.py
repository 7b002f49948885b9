"""Every request that is cancelled is answered, whenever the cancel comes: else its caller would wait for nothing."""

from __future__ import annotations

import asyncio
import socket

import pytest

from sandbox_pool.client.connection import Connection
from sandbox_pool.server.serving import wire
from support.slot_server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def frames(reader: asyncio.StreamReader, until: int | None = None) -> list[int]:
    """The numbers of the requests that frames belong to, up to the first of `until`."""
    decoder, numbers = wire.Decoder(), list[int]()
    while until not in numbers and (data := await reader.read(65536)):
        numbers += [header["i"] for header, _ in decoder.feed(data)]
    return numbers


async def test_a_request_and_its_cancel_may_arrive_together(server: Server) -> None:
    reader, writer = await asyncio.open_unix_connection(server.address.removeprefix("unix:"))
    writer.write(wire.encode({"i": 1, "op": "hello", "protocol": wire.PROTOCOL, "token": server.token}))
    assert await frames(reader, until=1) == [1]
    writer.write(wire.encode({"i": 2, "op": "health"}) + wire.encode({"i": 2, "op": "cancel"}))
    assert await frames(reader, until=2) == [2]
    writer.close()


async def test_an_answer_may_arrive_before_the_cancelled_caller_runs_again() -> None:
    ours, theirs = socket.socketpair()
    connection = Connection()
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=ours)
    reader, writer = await asyncio.open_connection(sock=theirs)
    call = asyncio.create_task(connection.call({"op": "health"}))
    await asyncio.sleep(0)
    call.cancel()
    connection.data_received(wire.encode({"i": 1}))
    with pytest.raises(asyncio.CancelledError):
        await call
    await connection.close()
    assert await frames(reader) == [1], "no cancel was sent, because nothing would have answered it"
    writer.close()
