"""The helper process that makes slots: starts it, asks it for slots, hears of their end."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Sequence

from .channel import Channel, Fields, Message, message_pair


class BuildError(Exception):
    """A slot could not be built; says at which step and why."""


def failure_text(message: Message) -> str:
    """A helper's failure in words."""
    error = message.number("errno")
    return f"{message.fields.get('step', 'unknown step')}: {os.strerror(error) if error else 'failed'}"


class Zygote:
    """Owner of the helper process. Ending it ends every slot: they carry its death signal."""

    def __init__(self, command: Sequence[str], run_dir: str, on_lost: Callable[[], None]) -> None:
        ours, theirs = message_pair()
        self.process = subprocess.Popen(
            [*command, "zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=run_dir,
            env={},
        )
        theirs.close()
        self._created: dict[str, asyncio.Future[int]] = {}
        self._dead: dict[int, asyncio.Future[int]] = {}
        self._channel = Channel(ours, self._on_message, on_lost)
        self._serial = 0

    async def create(self, fields: Fields) -> tuple[int, socket.socket]:
        """Clone a slot; returns the pid of its init and our end of its control socket."""
        self._serial += 1
        name = str(self._serial)
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._created[name] = future
        ours, theirs = message_pair()
        self._channel.send("create", [("slot", name), *fields], fds=[theirs.fileno()])
        theirs.close()
        try:
            pid = await future
        except BaseException:
            ours.close()
            raise
        return pid, ours

    def kill(self, pid: int) -> None:
        """Kill a slot's init, and with it everything in its PID namespace."""
        self._channel.send("kill", [("pid", pid)])

    async def wait_dead(self, pid: int) -> int:
        """Until the init is reaped; its wait status."""
        return await asyncio.shield(self._dead[pid])

    def forget(self, pid: int) -> None:
        """The end of this slot was seen."""
        self._dead.pop(pid, None)

    def start_worker(self, fields: Fields, fd: int) -> None:
        """A file worker on the host side, for snapshot layers."""
        self._channel.send("file", fields, fds=[fd])

    def _on_message(self, message: Message) -> None:
        if message.op == "dead":
            future = self._dead.get(message.number("pid"))
            if future is not None and not future.done():
                future.set_result(message.number("status"))
            return
        future = self._created.pop(message.fields.get("slot", ""), None)
        pid = message.number("pid")
        if message.op == "created":
            self._dead[pid] = asyncio.get_running_loop().create_future()
        if future is None or future.done():
            if message.op == "created":
                self.kill(pid)
            return
        if message.op == "created":
            future.set_result(pid)
        else:
            future.set_exception(BuildError(failure_text(message)))

    def close(self) -> None:
        """End the helper and with it all slots: nobody needs to wait for their end any more, nor can hear of it."""
        self._channel.close()
        for future in self._created.values():
            future.cancel()
        self.process.kill()
        status = self.process.wait()
        for ended in self._dead.values():
            if not ended.done():
                ended.set_result(status)


def slot_fields(pairs: list[tuple[str, object]]) -> list[tuple[str, str]]:
    """Configuration as message fields; booleans as 0 and 1, absent values left out."""
    return [
        (key, str(int(value)) if isinstance(value, bool) else str(value)) for key, value in pairs if value is not None
    ]
