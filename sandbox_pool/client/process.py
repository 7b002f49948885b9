"""A background process in a slot."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sandbox_pool.results import LogChunk

if TYPE_CHECKING:
    from sandbox_pool.client.connection import Connection, Header


class Process:
    """Handle on a process started with `spawn`; it ends with the lease at the latest."""

    def __init__(self, connection: Connection, header: Callable[..., Header], name: str, pid: int) -> None:
        self._connection = connection
        self._header = header
        self.id = name
        self.pid = pid
        """As seen inside the slot."""

    async def _ask(self, op: str, body: bytes = b"", **values: Any) -> tuple[Header, bytes]:
        return await self._connection.call(self._header(op, process=self.id, **values), body)

    async def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        header, _ = await self._ask("poll")
        return _code(header)

    async def wait(self, timeout_s: float | None = None) -> int | None:
        """Exit code as soon as it ends; None when it still runs after `timeout_s`."""
        header, _ = await self._ask("wait", timeout_s=timeout_s)
        return _code(header)

    async def log(self, offset: int = 0, limit: int | None = None) -> LogChunk:
        """What it wrote, from a byte offset on; the last 256 KiB are kept."""
        header, body = await self._ask("log", offset=offset, limit=limit)
        start = int(header["offset"])
        return LogChunk(body.decode("utf-8", "replace"), start, start + len(body), int(header["dropped"]))

    async def write(self, data: bytes | str) -> None:
        """Send to its stdin or terminal."""
        await self._ask("input", data.encode() if isinstance(data, str) else data)

    async def close_stdin(self) -> None:
        """End of input; on a terminal the end-of-file character."""
        await self._ask("input", eof=True)

    async def signal(self, number: int) -> None:
        """Send a signal to the process group of its shell."""
        await self._ask("signal", number=number)

    async def terminate(self) -> None:
        """Ask it to end."""
        await self.signal(signal.SIGTERM)

    async def kill(self) -> None:
        """Kill it with everything it started; returns when nothing of it is left."""
        await self._ask("kill")

    async def resize(self, rows: int, cols: int) -> None:
        """New size of its terminal."""
        await self._ask("resize", rows=rows, cols=cols)


def _code(header: Header) -> int | None:
    code = header["code"]
    return None if code is None else int(code)
