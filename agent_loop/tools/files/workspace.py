"""Paths and files of one rollout: where the shell stands, what `~` is, and edits of a file one at a time."""

from __future__ import annotations

import asyncio
import difflib
import errno
import hashlib
import posixpath
from collections.abc import AsyncIterator, Hashable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING

from agent_loop.tools.tool import InvalidArguments, ToolFailure
from agent_loop.turn.messages import sendable
from sandbox_pool.errors import SandboxFileError
from sandbox_pool.results import ExecResult

if TYPE_CHECKING:
    from sandbox_pool.client.sandbox import Sandbox

MAX_PATH_BYTES = 4096
MAX_SCRATCH_BYTES = 70
"""A socket below it must fit into the 107 bytes that Linux allows."""
SIMILAR_NAMES = 5
BAD_DIRECTORY = 126
"""Exit code of a command that could not start in its directory."""


class Workspace:
    """File access for the tools. Relative paths start where the model's shell stands."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._locks: dict[str, asyncio.Lock] = {}
        self._places: tuple[str, str] | None = None
        self.cwd = sandbox.workdir
        """The one working directory: of the shell, of scripts, and of relative paths."""
        self._last_read: Hashable = None
        self._same_reads = 0
        self._seen: dict[str, bytes] = {}

    def count_read(self, what: Hashable) -> int:
        """How many times in a row exactly this was read, this time included."""
        self._same_reads = self._same_reads + 1 if what == self._last_read else 1
        self._last_read = what
        return self._same_reads

    def forget_reads(self) -> None:
        """Another tool ran: the next read is the first in a row."""
        self._last_read = None

    def saw(self, path: str, data: bytes) -> None:
        """The model has read, or written, the whole of this file."""
        self._seen[path] = _digest(data)

    def changed_since_seen(self, path: str, data: bytes) -> bool:
        """Whether the file, which holds this now, is not what the model last saw of it."""
        return path in self._seen and self._seen[path] != _digest(data)

    def after_command(self, cwd: str) -> None:
        """Note where a command left the shell."""
        if cwd:
            self.cwd = cwd

    def start(self) -> str | None:
        """Directory to start the next command in; None (the shell's own) when its name cannot be sent."""
        return self.cwd if "\ufffd" not in self.cwd and sendable(self.cwd) == self.cwd else None

    def unusable(self, cwd: str | None, result: ExecResult) -> ToolFailure | None:
        """The failure of a command that could not start in its directory. A session that lost its folder goes on."""
        cd = f"bash: line 1: cd: {cwd}: "
        if result.exit_code != BAD_DIRECTORY or cwd is None or not result.output.startswith(cd):
            return None
        return self._no_directory(cwd, result.output[len(cd) :].strip())

    def _no_directory(self, cwd: str, reason: str) -> ToolFailure:
        said = f"The command was not run: the working directory {cwd} cannot be used ({reason})."
        if cwd == self.cwd:
            self.cwd = self._sandbox.workdir if cwd != self._sandbox.workdir else "/"
            said += f" The session now stands in {self.cwd}."
        return ToolFailure(said, output="", exit_code=BAD_DIRECTORY)

    async def check_directory(self, cwd: str) -> None:
        """Raises ToolFailure when a process could not start there."""
        try:
            found = await self._sandbox.stat(f"{cwd}/.")
        except SandboxFileError as error:
            raise self._no_directory(cwd, error.strerror or str(error)) from error
        if found is None:
            raise self._no_directory(cwd, "No such file or directory")

    async def resolve(self, path: str) -> str:
        """The path to use with the sandbox. Raises InvalidArguments for what no file system takes."""
        if not path.strip():
            raise InvalidArguments("The path is empty.")
        if "\0" in path:
            raise InvalidArguments("The path has a NUL character, which no file name can have.")
        try:
            size = len(path.encode())
        except UnicodeEncodeError:
            raise InvalidArguments("The path has characters that are not valid Unicode.") from None
        if size > MAX_PATH_BYTES:
            raise InvalidArguments(f"The path is {size} bytes long; {MAX_PATH_BYTES} is the limit.")
        if path == "~" or path.startswith("~/"):
            path = posixpath.join((await self._find_places())[0], path[2:])
        return _plain(posixpath.join(self.cwd, path))

    async def scratch(self) -> str:
        """Where temporary files go: /tmp, or the slot's own place where /tmp is not its own."""
        return (await self._find_places())[1]

    async def _find_places(self) -> tuple[str, str]:
        """Home and scratch directory, asked once."""
        if self._places is None:
            result = await self._sandbox.exec(r'printf "%s\0%s" "$HOME" "${TMPDIR:-/tmp}"', timeout_s=10)
            home, _, scratch = result.output.partition("\0")
            usable = scratch.startswith("/") and len(scratch.encode("utf-8", "replace")) <= MAX_SCRATCH_BYTES
            self._places = home or "/", scratch if usable else "/tmp"
        return self._places

    @asynccontextmanager
    async def editing(self, paths: Iterable[str]) -> AsyncIterator[None]:
        """Hold these files for a read-change-write: calls of the same turn must not undo each other's edits."""
        async with AsyncExitStack() as held:
            # One order for everybody, so that two patches over the same files cannot wait for each other.
            for path in sorted({posixpath.normpath(path) for path in paths}):
                await held.enter_async_context(self._locks.setdefault(path, asyncio.Lock()))
            yield

    async def read(self, path: str, limit_bytes: int) -> bytes | None:
        """The whole file, or None when there is none. Raises ToolFailure when it is larger, or cannot be read."""
        try:
            data = await self._sandbox.read_file(path, offset=0, length=limit_bytes + 1)
        except SandboxFileError as error:
            if error.errno == errno.ENOENT:
                return None
            raise file_failure(path, error) from error
        if len(data) > limit_bytes:
            raise ToolFailure(f"{path} is larger than {limit_bytes:,} bytes: too large to edit here. Use the terminal.")
        return data

    async def mode(self, path: str) -> int | None:
        """Permissions of a file, or None when there is none."""
        try:
            found = await self._sandbox.stat(path)
        except SandboxFileError as error:
            raise file_failure(path, error) from error
        return found.mode if found and found.kind == "file" else None

    async def write(self, path: str, data: bytes, mode: int | None = None) -> None:
        """Write a file atomically; parents are made, an existing file's mode is kept unless one is given."""
        try:
            await self._sandbox.write_file(path, data, mode=mode)
        except SandboxFileError as error:
            raise file_failure(path, error) from error
        self.saw(path, data)

    async def remove(self, path: str) -> None:
        """Delete a file; one that is gone already is fine."""
        try:
            await self._sandbox.remove(path)
        except SandboxFileError as error:
            if error.errno != errno.ENOENT:
                raise file_failure(path, error) from error

    async def similar(self, path: str) -> list[str]:
        """Names like this one in the same directory, for the error about a missing file."""
        folder, name = posixpath.split(path)
        try:
            entries = [entry for entry, _ in await self._sandbox.list_dir(folder or "/")]
        except SandboxFileError:
            return []
        lowered = {entry.lower(): entry for entry in sorted(entries)}
        close = difflib.get_close_matches(name.lower(), list(lowered)[:2000], n=SIMILAR_NAMES, cutoff=0.5)
        return [posixpath.join(folder, lowered[match]) for match in close]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _plain(path: str) -> str:
    """The path without empty and `.` parts, so that one file has one name. `..` stays: before it may be a link."""
    if "/./" not in path and "//" not in path and not path.endswith("/."):
        return path
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return "/" + "/".join(parts) + ("/" if path.endswith("/") and parts else "")


_SENTENCES = {
    errno.ENOENT: "does not exist",
    errno.EISDIR: "is a directory",
    errno.ENOTDIR: "cannot be: a part of the path is not a directory",
    errno.EACCES: "cannot be accessed: permission denied",
    errno.EPERM: "cannot be accessed: not permitted",
    errno.EINVAL: "is not a regular file",
    errno.EROFS: "cannot be written: the file system is read-only",
    errno.ELOOP: "has too many symbolic links",
    errno.ENAMETOOLONG: "is too long a name",
    errno.ENOSPC: "cannot be written: the disk of the sandbox is full",
    errno.EDQUOT: "cannot be written: the disk of the sandbox is full",
}


def file_failure(path: str, error: SandboxFileError) -> ToolFailure:
    """What the model reads about a refused file call."""
    sentence = _SENTENCES.get(error.errno or 0) or f"cannot be used: {error.strerror or error}"
    return ToolFailure(f"{path} {sentence}.")
