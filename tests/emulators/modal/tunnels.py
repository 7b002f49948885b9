"""A port of a sandbox as the world reaches it: a TLS (or plain) port of this machine that leads inside."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import TYPE_CHECKING

from grpclib import GRPCError
from modal_proto import api_pb2

from .backends import ADDRESS

if TYPE_CHECKING:
    from .sandbox import Sandbox

HOST = "127.0.0.1"
CHUNK_BYTES = 65536
CONNECT_S = 10


class Tunnel:
    """Open until the sandbox ends. Open connections keep the sandbox from being idle."""

    def __init__(self, sandbox: Sandbox, port: int) -> None:
        self._sandbox = sandbox
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def open(self, context: ssl.SSLContext | None) -> api_pb2.TunnelData:
        """With a context it is an encrypted port."""
        self._server = await asyncio.start_server(self._serve, HOST, 0, ssl=context)
        port = self._server.sockets[0].getsockname()[1]
        data = api_pb2.TunnelData(container_port=self._port, host=HOST, port=port)
        if context is None:
            data.unencrypted_host, data.unencrypted_port = HOST, port
        return data

    def cut(self) -> None:
        """Break every connection; new ones are taken."""
        for writer in list(self._connections):
            writer.transport.abort()

    def close(self) -> None:
        """Break every connection and take no more."""
        if self._server is not None:
            self._server.close()
        self.cut()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            with self._sandbox.activity.busy():
                await self._sandbox.worker.gate()
                inner_reader, inner_writer = await connect(self._sandbox, self._port)
                self._connections.add(inner_writer)
                try:
                    await asyncio.gather(self._pump(reader, inner_writer), self._pump(inner_reader, writer))
                finally:
                    self._connections.discard(inner_writer)
                    inner_writer.close()
        except (OSError, TimeoutError, GRPCError):
            writer.transport.abort()
        finally:
            self._connections.discard(writer)
            writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._sandbox.worker.gate()
            writer.write(data)
            await writer.drain()
        # TLS cannot be half closed: the end of one direction is then the end of both.
        if writer.can_write_eof():
            with contextlib.suppress(OSError):
                writer.write_eof()
        else:
            writer.close()


async def connect(sandbox: Sandbox, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a port inside."""
    plug = sandbox.backend.connect_socket()
    try:
        async with asyncio.timeout(CONNECT_S):
            await asyncio.get_running_loop().sock_connect(plug, (ADDRESS, port))
        return await asyncio.open_connection(sock=plug)
    except BaseException:
        plug.close()
        raise
