"""A running command: its output is kept and can be read from any offset, its input is taken at offsets."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from grpclib import Status

from .faults import error

CHUNK_BYTES = 65536
SPOOLED_BYTES = 1 << 20


class Spool:
    """Append-only output of one stream; readers follow from any offset."""

    def __init__(self) -> None:
        # Most outputs are small, and a file for each would soon be all files a process may open.
        self._file = tempfile.SpooledTemporaryFile(SPOOLED_BYTES)  # noqa: SIM115 -- lives as long as this
        self._size = 0
        self._ended = False
        self._changed = asyncio.Event()

    def feed(self, data: bytes) -> None:
        """More output."""
        self._file.seek(self._size)
        self._file.write(data)
        self._size += len(data)
        self._wake()

    def end(self) -> None:
        """No more output will come."""
        self._ended = True
        self._wake()

    def close(self) -> None:
        """Nobody will read it any longer."""
        self._file.close()

    def _wake(self) -> None:
        old, self._changed = self._changed, asyncio.Event()
        old.set()

    async def chunks(self, offset: int) -> AsyncIterator[bytes]:
        """What was and will be put out from this offset on."""
        while True:
            changed = self._changed
            while offset < self._size:
                self._file.seek(offset)
                data = self._file.read(min(CHUNK_BYTES, self._size - offset))
                offset += len(data)
                yield data
            if self._ended and offset >= self._size:
                return
            if changed is self._changed:
                await changed.wait()


async def readable(fd: int) -> None:
    """Return when something, or the end, can be read."""
    await _told(fd, asyncio.get_running_loop().add_reader, asyncio.get_running_loop().remove_reader)


async def writable(fd: int) -> None:
    """Return when something can be written, or nobody reads any longer."""
    await _told(fd, asyncio.get_running_loop().add_writer, asyncio.get_running_loop().remove_writer)


async def _told(fd: int, add: Callable[..., None], remove: Callable[[int], object]) -> None:
    ready = asyncio.Event()
    add(fd, ready.set)
    try:
        await ready.wait()
    finally:
        remove(fd)


class Process:
    """A command: an exec, or what a sandbox was made to run."""

    def __init__(self) -> None:
        self.out, self.err = Spool(), Spool()
        self.done = asyncio.Event()
        self.code: int | None = None
        """The exit code, or minus the signal that ended it."""
        self.stdin_offset = 0
        self.stdin_closed = False
        self.lost = False
        """The sandbox ended before the command did."""
        self._popen: subprocess.Popen[bytes] | None = None
        self._stdin: int | None = None
        self._writing = asyncio.Lock()
        self._followed: set[int] = set()

    @property
    def pid(self) -> int:
        """Of the process this emulator started for it."""
        assert self._popen is not None
        return self._popen.pid

    def start(self, argv: Sequence[str], env: Mapping[str, str], *, terminal: bool = False,
              discard: tuple[bool, bool] = (False, False), pass_fds: Sequence[int] = ()) -> None:  # fmt: skip
        """Run it; `discard` says whether standard output and standard error are thrown away."""
        if terminal:
            self._start_on_terminal(argv, env)
        else:
            stdout, stderr = (subprocess.DEVNULL if gone else subprocess.PIPE for gone in discard)
            self._popen = subprocess.Popen(argv, env=env, cwd="/", stdin=subprocess.PIPE, stdout=stdout, stderr=stderr,
                                           start_new_session=True, pass_fds=pass_fds)  # fmt: skip
            assert self._popen.stdin is not None
            self._stdin = os.dup(self._popen.stdin.fileno())
            for pipe, spool in ((self._popen.stdout, self.out), (self._popen.stderr, self.err)):
                self._follow(None if pipe is None else os.dup(pipe.fileno()), spool)
                if pipe is not None:
                    pipe.close()
            self._popen.stdin.close()
        assert self._stdin is not None
        os.set_blocking(self._stdin, False)
        exited = os.pidfd_open(self.pid)
        asyncio.get_running_loop().add_reader(exited, self._reap, exited)

    def _start_on_terminal(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        master, slave = pty.openpty()
        self._popen = subprocess.Popen(
            argv, env=env, cwd="/", stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self._stdin = os.dup(master)
        self._follow(master, self.out)
        self.err.end()

    def _follow(self, fd: int | None, spool: Spool) -> None:
        if fd is None:
            spool.end()
            return
        os.set_blocking(fd, False)
        self._followed.add(fd)
        asyncio.get_running_loop().add_reader(fd, self._read, fd, spool)

    def _unfollow(self, fd: int) -> None:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
        self._followed.discard(fd)

    def _read(self, fd: int, spool: Spool) -> None:
        try:
            data = os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            # The other end of a terminal is closed.
            data = b""
        if data:
            spool.feed(data)
            return
        self._unfollow(fd)
        spool.end()

    def _reap(self, exited: int) -> None:
        assert self._popen is not None
        asyncio.get_running_loop().remove_reader(exited)
        os.close(exited)
        self.code = self._popen.wait()
        self.done.set()
        if not self._writing.locked():
            self._close_stdin()

    async def write(self, offset: int, data: bytes, eof: bool) -> None:
        """Take input; what was taken already by an earlier try is skipped."""
        async with self._writing:
            if offset > self.stdin_offset:
                raise error(Status.FAILED_PRECONDITION, f"stdin offset {offset} beyond {self.stdin_offset}")
            view = memoryview(data)[self.stdin_offset - offset :]
            while view:
                if self._stdin is None:
                    raise error(Status.FAILED_PRECONDITION, "stdin is closed")
                try:
                    taken = os.write(self._stdin, view)
                except BlockingIOError:
                    await writable(self._stdin)
                    continue
                except OSError as broken:
                    raise error(Status.FAILED_PRECONDITION, "the process closed its stdin") from broken
                self.stdin_offset += taken
                view = view[taken:]
            if eof:
                self._close_stdin()

    def _close_stdin(self) -> None:
        self.stdin_closed = True
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def kill(self) -> None:
        """End it and its process group."""
        if self._popen is not None and self.code is None:
            os.killpg(self._popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Let go of what it put out; it has ended."""
        self._close_stdin()
        for fd in list(self._followed):
            self._unfollow(fd)
        self.out.close()
        self.err.close()

    def status(self) -> dict[str, int]:
        """How it ended, as the router says it; empty while it runs."""
        if self.code is None:
            return {}
        return {"signal": -self.code} if self.code < 0 else {"code": self.code}
