"""One emulated sandbox: processes, mounts and network of its own, its own /tmp, and the files of its image in /srv."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

SCRIPT = (
    'mount --bind "$1" /srv && mount -t tmpfs -o mode=1777 tmpfs /tmp && ip link set lo up && echo ready && '
    "exec sleep infinity"
)
INIT = ["unshare", "--pid", "--mount", "--net", "--fork", "--kill-child", "--mount-proc", "sh", "-c", SCRIPT, "sh"]
CLONE_NEWNET = 0x40000000


class EmulatedSandbox:
    """Runs from `start` until `end`."""

    def __init__(self, image: Path = Path("/srv")) -> None:
        self._image = image
        self._outer: asyncio.subprocess.Process | None = None
        self._pid = 0

    async def start(self) -> None:
        """Returns when commands can be run in it."""
        pipe = asyncio.subprocess.PIPE
        self._outer = await asyncio.create_subprocess_exec(
            *INIT, self._image, stdout=pipe, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        assert self._outer.stdout is not None
        assert await self._outer.stdout.readline() == b"ready\n", "no namespaces for a sandbox"
        children = Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children")
        self._pid = int((await asyncio.to_thread(children.read_text)).split()[0])

    async def run(self, command: str, timeout_s: float | None) -> tuple[int, str]:
        """Exit code and output of a shell command, once nobody has the output open any more."""
        inside = ["nsenter", f"--target={self._pid}", "--pid", "--mount", "--net", "sh", "-c", command]
        process = await asyncio.create_subprocess_exec(
            *inside, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        async with asyncio.timeout(timeout_s):
            out, _ = await process.communicate()
        return process.returncode or 0, out.decode("utf-8", "replace")

    async def connect(self, port: int) -> socket.socket:
        """A connection to a port in the sandbox's own network."""
        return await asyncio.to_thread(self._connect, port)

    def _connect(self, port: int) -> socket.socket:
        found: list[Any] = []

        def inside() -> None:
            try:
                with Path(f"/proc/{self._pid}/ns/net").open() as network:
                    if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                found.append(socket.create_connection(("127.0.0.1", port), 5))
            except OSError as error:
                found.append(error)

        # A thread that ends here: it stays in the sandbox's network.
        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if isinstance(found[0], OSError):
            raise found[0]
        found[0].setblocking(False)
        return found[0]  # type: ignore[no-any-return]

    async def end(self) -> None:
        """Kill everything in it; returns when all is gone."""
        if self._outer is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            await self._outer.wait()
