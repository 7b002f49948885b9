"""Local side of uploads and downloads: trees as a stream of records, see PROTOCOL.md.

Links are copied as links and never followed, on both sides. A record that would leave the target directory is refused.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import struct
from collections.abc import AsyncIterator
from pathlib import Path

from sandbox_pool.errors import ProtocolError, SandboxFileError

RECORD = struct.Struct("<BIIIqQH")
PIECE = 1 << 20
MAX_LINK = 4096


def _record(kind: str, path: str, info: os.stat_result | None, size: int) -> bytes:
    name = os.fsencode(path)
    mode = stat.S_IMODE(info.st_mode) if info else 0
    return RECORD.pack(ord(kind), mode, 0, 0, info.st_mtime_ns if info else 0, size, len(name)) + name


def is_tree(source: Path) -> bool:
    """Whether an upload of this is a tree; a link is copied as a link, whatever it points to."""
    return source.is_dir() and not source.is_symlink()


async def pack_local(source: Path, name: str) -> AsyncIterator[bytes]:
    """Records of a local file or tree; `name` is the path of its root in the stream."""
    for path, relative in await asyncio.to_thread(_walk, source, name):
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            target = os.fsencode(os.readlink(path))
            yield _record("l", relative, info, len(target)) + target
        elif stat.S_ISDIR(info.st_mode):
            yield _record("d", relative, info, 0)
        elif stat.S_ISREG(info.st_mode):
            async for piece in _file_record(path, relative):
                yield piece
    yield _record("e", "", None, 0)


def _walk(source: Path, name: str) -> list[tuple[str, str]]:
    """Every entry with its path in the stream, parents first."""
    if not source.exists() and not source.is_symlink():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(source))
    found = [(str(source), name)]
    if not is_tree(source):
        return found
    for directory, names, files in os.walk(source):
        inside = os.path.relpath(directory, source)
        for entry in sorted(names + files):
            relative = os.path.normpath(os.path.join(name, inside, entry))
            found.append((os.path.join(directory, entry), relative))
    return found


async def _file_record(path: str, relative: str) -> AsyncIterator[bytes]:
    """A file that shrinks while it is read is filled up with zeros: its size was promised."""
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        left = info.st_size
        yield _record("f", relative, info, left)
        while left > 0:
            data = await asyncio.to_thread(file.read, min(left, PIECE))
            data = data or bytes(min(left, PIECE))
            left -= len(data)
            yield data


class _Reader:
    """Exact reads from a stream of pieces."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._buffer = bytearray()

    async def some(self, limit: int) -> bytes:
        """At least one byte, at most `limit`."""
        while not self._buffer:
            try:
                self._buffer += await anext(self._stream)
            except StopAsyncIteration:
                raise ProtocolError("the download ended too early") from None
        data = bytes(self._buffer[:limit])
        del self._buffer[:limit]
        return data

    async def exactly(self, size: int) -> bytes:
        """`size` bytes."""
        data = b""
        while len(data) < size:
            data += await self.some(size - len(data))
        return data


async def unpack_local(stream: AsyncIterator[bytes], target: Path, remote: str) -> None:
    """Write a downloaded file or tree to `target`."""
    reader = _Reader(stream)
    directories: list[tuple[str, int, int]] = []
    root = target
    if target.is_dir():
        root = target / (remote.rstrip("/").rpartition("/")[2] or "root")
    try:
        while True:
            kind, mode, _, _, mtime_ns, size, length = RECORD.unpack(await reader.exactly(RECORD.size))
            if kind == ord("e"):
                break
            name = os.fsdecode(await reader.exactly(length))
            if name == "" and kind == ord("d"):
                root = target  # a tree replaces nothing: it is merged into the directory asked for
            path = _local_path(root, name)
            await _write_entry(reader, chr(kind), path, mode, mtime_ns, size)
            if kind == ord("d"):
                directories.append((path, mode, mtime_ns))
    finally:
        # Last, and children first: a read-only directory must still be filled, and filling it changes its time.
        for path, mode, mtime_ns in reversed(directories):
            os.chmod(path, mode)
            os.utime(path, ns=(mtime_ns, mtime_ns))


def _local_path(root: Path, name: str) -> str:
    """Where an entry goes; refused when any part of the way is a link or leads upwards."""
    if name == "":
        return str(root)
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise SandboxFileError(errno.EINVAL, "path leads out of the download", name)
    parent = root
    for part in parts[:-1]:
        parent = parent / part
        if parent.is_symlink():
            raise SandboxFileError(errno.ELOOP, "path leads through a link", name)
    return str(parent / parts[-1])


async def _write_entry(reader: _Reader, kind: str, path: str, mode: int, mtime_ns: int, size: int) -> None:
    if kind == "d":
        if os.path.islink(path):
            os.unlink(path)
        os.makedirs(path, exist_ok=True)
    elif kind == "l":
        if size > MAX_LINK:
            raise ProtocolError("a link target of more than 4096 bytes")
        link = await reader.exactly(size)
        _clear(path)
        os.symlink(link, os.fsencode(path))
    elif kind == "f":
        _clear(path)
        await _write_file(reader, path, size)
        os.chmod(path, mode & 0o777)  # never set-id bits on this side
        os.utime(path, ns=(mtime_ns, mtime_ns))
    else:
        raise ProtocolError(f"unknown record {kind!r} in a download")


def _clear(path: str) -> None:
    if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
        os.unlink(path)


async def _write_file(reader: _Reader, path: str, size: int) -> None:
    parent = os.path.dirname(path)
    if parent:
        os.makedirs(parent, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
        while size > 0:
            data = await reader.some(min(size, PIECE))
            await asyncio.to_thread(file.write, data)
            size -= len(data)
