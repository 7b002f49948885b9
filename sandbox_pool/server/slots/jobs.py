"""One command in a slot: the server's side of its keeper process."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..faults import SlotError, file_error
from . import shell
from .channel import Channel, Message, encode_fields, message_pair
from .zygote import failure_text

if TYPE_CHECKING:
    from .instance import Instance

BASH = "/bin/bash"
ALIVE_MS = 10_000
"""How often a running command says so, unless asked otherwise."""
_numbers = itertools.count(1)


def shell_fields(state: bytes, boot: str, program: Sequence[str]) -> bytes:
    """How a shell that starts from this state is to be started: made once per state, used for every command."""
    env, restore_from = shell.split_state(state)
    # By its path, so that it need not search itself; the last argument is its $0, which error messages begin with.
    fields: list[tuple[str, Any]] = [("program", program[0])]
    fields += [("arg", word) for word in (*program, "-c", shell.START, "bash")]
    fields += [("env", name.encode() + b"=" + value) for name, value in env]
    fields += [("env", f"__hermes={boot}"), ("state_size", len(state)), ("restore_from", restore_from)]
    return encode_fields(fields)


class Job:
    """A keeper and the shell it started, waiting for its command or running it."""

    def __init__(
        self,
        instance: Instance,
        *,
        stdin: bytes | None = None,
        separate: bool = False,
        background: bool = False,
        terminal: tuple[int, int] | None = None,
    ) -> None:
        self.instance = instance
        self.state = instance.state
        self.background = background
        loop = asyncio.get_running_loop()
        self.exit: asyncio.Future[Message] = loop.create_future()
        self.started: asyncio.Future[int] = loop.create_future()
        self.on_alive: Callable[[float], None] | None = None
        self._logs: dict[int, asyncio.Future[Message]] = {}
        self.ran = True
        self._serial = 0
        self._began = 0.0
        ours, theirs = message_pair()
        # The shell waits on a pipe of ours: it is woken without a detour through its keeper.
        wake_read, self._wake = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._wake, False)
        self._script = os.memfd_create("script")
        self.channel = Channel(ours, self._on_message, self._on_close)
        self.id = next(_numbers)
        kind: list[tuple[str, Any]] = [("id", self.id)]
        if background:
            kind.append(("background", 1))
        if separate:
            kind.append(("separate", 1))
        if stdin is not None:
            kind.append(("stdin", 1))
        if terminal:
            kind += [("pty", 1), ("rows", terminal[0]), ("cols", terminal[1])]
        fields = encode_fields(kind) + (instance.spawn_fields if background else instance.exec_fields)
        raw = self.state + stdin if stdin else self.state
        instance.control.send("job", fields, raw, fds=[theirs.fileno(), wake_read, self._script])
        theirs.close()
        os.close(wake_read)
        instance.jobs.add(self)

    def _on_message(self, message: Message) -> None:
        if message.op == "exit":
            if not self.background:
                self._finish()
            if not self.exit.done():
                self.exit.set_result(message)
        elif message.op == "alive":
            if self.on_alive is not None:
                self.on_alive(message.number("us") / 1e6)
        elif message.op == "started":
            if not self.started.done():
                self.started.set_result(message.number("pid"))
        elif message.op == "log":
            waiting = self._logs.pop(message.number("id"), None)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif message.op == "failed":
            self._not_started(message)

    def _not_started(self, message: Message) -> None:
        """No process, memory or descriptor was left for the shell: commands used up what the slot has."""
        text = f"the command could not start: {failure_text(message)}\n"
        fields = {"status": str(126 << 8), "us": "0", "out_head": str(len(text)), "out_chars": str(len(text))}
        if not self.exit.done():
            self.exit.set_result(Message("exit", fields, text.encode()))
        self.fail(file_error(message.number("errno"), BASH))

    def _on_close(self) -> None:
        """The keeper was killed: by the slot's own processes, by the OOM killer, or with all others."""
        self._finish()
        if not self.exit.done():
            elapsed_us = int((time.monotonic() - self._began) * 1e6) if self._began else 0
            self.exit.set_result(Message("exit", {"status": str(int(signal.SIGKILL)), "us": str(elapsed_us)}, b""))
        self.fail(self._gone())

    def _gone(self) -> SlotError:
        """With its slot, or alone: killed by the slot's own processes, or never started because they left no room."""
        if self.instance.lost:
            return SlotError("lost", self.instance.lost)
        return file_error(errno.ESRCH, BASH)

    def fail(self, error: SlotError) -> None:
        """The keeper is gone: everyone who waits for it gets this error."""
        waiting: list[asyncio.Future[Any]] = [self.exit, self.started, *self._logs.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting for this one
        self._logs.clear()

    def _finish(self) -> None:
        self._close_script()
        self.channel.close()
        self.instance.jobs.discard(self)

    def run(self, script: bytes, *, timeout_ms: int, max_chars: int, log_path: str, alive_ms: int = ALIVE_MS) -> None:
        """Hand the waiting shell its command."""
        fields: list[tuple[str, Any]] = [
            ("timeout_ms", timeout_ms),
            ("max_chars", max_chars),
            ("log", log_path),
            ("alive_ms", alive_ms),
        ]
        self._began = time.monotonic()
        self.channel.send("run", fields)
        view = memoryview(script)
        while view:
            view = view[os.write(self._script, view) :]
        try:
            os.write(self._wake, b"\n")
        except OSError:
            self.ran = False  # its shell was killed while it waited
        self._close_script()

    def _close_script(self) -> None:
        if self._wake >= 0:
            os.close(self._wake)
            os.close(self._script)
            self._wake = self._script = -1

    def kill(self) -> None:
        """Kill the command and everything it started, nothing else."""
        self.channel.send("kill")

    async def outcome(self) -> Message:
        """The exit message. Cancelling the caller does not end the command; `kill` does."""
        try:
            return await self.exit
        except asyncio.CancelledError:
            if self.exit.cancelled():
                self.exit = asyncio.get_running_loop().create_future()
            raise

    def drop(self) -> None:
        """Kill it from outside: its keeper did not do what it was told in time, perhaps because the slot stopped it."""
        if not self.exit.done() and not self.instance.lost:
            self.instance.control.send("drop", [("id", self.id)])

    async def log(self, offset: int, limit: int | None) -> Message:
        """Part of a background process's rolling log."""
        self._serial += 1
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if self.channel.closed:
            raise self._gone()
        self._logs[self._serial] = future
        self.channel.send("log", [("id", self._serial), ("offset", offset), ("limit", -1 if limit is None else limit)])
        return await future

    def discard(self) -> None:
        """Let go; a command that still runs is killed by its keeper."""
        self._finish()


def exit_code(status: int, timed_out: bool) -> tuple[int, int | None]:
    """Exit code as bash gives it, and the signal when one ended the shell itself."""
    if timed_out:
        return 124, None
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return 128 + number, number
    return os.WEXITSTATUS(status), None
