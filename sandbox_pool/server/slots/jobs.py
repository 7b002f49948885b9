"""One command in a slot: the server's side of its keeper process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..faults import SlotError, file_error
from . import shell
from .channel import Channel, Fields, Message, encode_fields, message_pair
from .zygote import failure_text

if TYPE_CHECKING:
    from .instance import Instance

BASH = "/bin/bash"
_numbers = itertools.count(1)


def next_number() -> int:
    """Of a job, or of a state that came from elsewhere."""
    return next(_numbers)


DROPPED = (
    "GCONV_PATH", "GETCONF_DIR", "GLIBC_TUNABLES", "HOSTALIASES", "LD_AUDIT", "LD_BIND_NOT", "LD_BIND_NOW", "LD_DEBUG",
    "LD_DEBUG_OUTPUT", "LD_DYNAMIC_WEAK", "LD_LIBRARY_PATH", "LD_ORIGIN_PATH", "LD_PRELOAD", "LD_PROFILE",
    "LD_PROFILE_OUTPUT", "LD_SHOW_AUXV", "LD_USE_LOAD_BIAS", "LD_VERBOSE", "LD_WARN", "LOCALDOMAIN", "LOCPATH",
    "MALLOC_CHECK_", "MALLOC_PERTURB_", "MALLOC_TRACE", "NIS_PATH", "NLSPATH", "RESOLV_HOST_CONF", "RES_OPTIONS",
    "TMPDIR", "TZDIR",
)  # fmt: skip
"""Variables that the C library takes from a shell which others cannot look into (helper/hidden.c), as it does where a
program has more rights than its user. The shell sets them itself, for the programs that it starts; passed to it, they
would crash the loader of a shell that was brought along, which loses its place when it takes them away."""


def shell_fields(environment: Mapping[str, str], boot: str, program: Sequence[str], folder: str) -> bytes:
    """How a shell is to be started: the same for every slot of a kind."""
    return _shell_fields(tuple(environment.items()), boot, tuple(program), folder)


@functools.lru_cache(maxsize=64)
def _shell_fields(variables: tuple[tuple[str, str], ...], boot: str, program: tuple[str, ...], folder: str) -> bytes:
    environment = dict(variables)
    # By its path, so that it need not search itself; the last argument is its $0, which error messages begin with.
    fields: list[tuple[str, Any]] = [("program", program[0])]
    fields += [("arg", word) for word in (*program, "-c", shell.start(folder), "bash")]
    fields += [("env", f"{name}={value}") for name, value in environment.items() if name not in DROPPED]
    exports = "".join(f"export {name}={shlex.quote(environment[name])};" for name in DROPPED if name in environment)
    fields.append(("env", f"__hermes={exports}{boot}"))
    return encode_fields(fields)


class Job:
    """A keeper and the shell it started: of a session, one command after the other, or of one background process."""

    def __init__(
        self,
        instance: Instance,
        fields: bytes,
        *,
        state: int = 0,
        background: bool = False,
        terminal: tuple[int, int] | None = None,
    ) -> None:
        self.instance = instance
        self.background = background
        self._loop = asyncio.get_running_loop()
        self.exit: asyncio.Future[Message] = self._loop.create_future()
        self.started: asyncio.Future[int] = self._loop.create_future()
        self.on_alive: Callable[[float], None] | None = None
        self._logs: dict[int, asyncio.Future[Message]] = {}
        self._serial = 0
        self._began = 0.0
        ours, theirs = message_pair()
        self.channel = Channel(ours, self._on_message, self._on_close)
        self.id = next_number()
        kind: list[tuple[str, Any]] = [("id", self.id), ("from", state)]
        if background:
            kind.append(("background", 1))
        if terminal:
            kind += [("pty", 1), ("rows", terminal[0]), ("cols", terminal[1])]
        instance.control.send("job", encode_fields(kind) + fields, fds=[theirs.fileno()])
        theirs.close()
        instance.jobs.add(self)

    def _on_message(self, message: Message) -> None:
        if message.op == "exit":
            if not self.exit.done():
                self.exit.set_result(message)
        elif message.op == "gone":
            if not self.exit.done():  # its shell ended while it waited: a command that is on its way there is not begun
                self.exit.set_result(Message("exit", {"begun": "0"}, b""))
            self._finish()
        elif message.op == "awake":
            self.instance.stays_awake(self)
        elif message.op == "line":
            self.instance.line_told(self, message)
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
        self.channel.close()
        self.instance.job_ended(self)

    def run(self, fields: Fields, raw: bytes) -> None:
        """Hand the waiting shell a command (`run_message`); its outcome arrives at `exit`."""
        if self.exit.done():
            self.exit = self._loop.create_future()
        self._began = time.monotonic()
        self.channel.send("run", fields, raw)

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
        if not self.exit.done():
            self.drop_keeper()

    def drop_keeper(self) -> None:
        """The same, whatever it is doing."""
        if not self.instance.lost:
            self.instance.control.send("drop", [("id", self.id)])

    @contextlib.contextmanager
    def dropped_after(self, seconds: float) -> Iterator[None]:
        """The same, when what is in the block takes longer."""
        late = self._loop.call_later(seconds, self.drop)
        try:
            yield
        finally:
            late.cancel()

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
        """Let go; its keeper kills the shell, and what a command that still runs has started."""
        self._finish()
