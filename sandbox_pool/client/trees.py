"""Local side of uploads and downloads: trees as a stream of records, see PROTOCOL.md.

Links are copied as links and never followed, on both sides. Everything on this side is opened below a descriptor, one
name at a time, so that no link an agent made leads out of the folder, and no path is too long. What comes out of a slot
is limited (`TreeLimits`), holes stay holes, and nothing of it is handled on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import struct
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_pool.errors import ProtocolError, SandboxFileError

RECORD = struct.Struct("<BIIIqQH")
LAYER_RECORD = struct.Struct("!cI")
"""Of an exported snapshot: m (description), d (data of the current layer), n (layer complete)."""
WHOLE, EXTENT = struct.Struct("<Q"), struct.Struct("<QQ")
"""Of a sparse file: its size; offset and length of each piece of data."""
PIECE = 1 << 20
BLOCK = 1 << 16
ZEROS = bytes(BLOCK)
MAX_LINK = 4096
MAX_PATH = 1 << 15
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Parser = Generator[None, bytes, Any]


@dataclass(frozen=True)
class TreeLimits:
    """What one download may bring to this machine. The other side is an agent's."""

    size: int = 16 << 30
    """Bytes of all files, holes too."""
    entries: int = 1_000_000
    names: int = 128 << 20
    """Bytes of all paths."""
    depth: int = 200


def _record(kind: str, path: str, info: os.stat_result | None, size: int) -> bytes:
    name = os.fsencode(path)
    mode = stat.S_IMODE(info.st_mode) if info else 0
    return RECORD.pack(ord(kind), mode, 0, 0, info.st_mtime_ns if info else 0, size, len(name)) + name


def is_tree(source: Path) -> bool:
    """Whether an upload of this is a tree; a link is copied as a link, whatever it points to."""
    return source.is_dir() and not source.is_symlink()


async def pack_local(source: Path, name: str) -> AsyncIterator[bytes]:
    """Records of a local file or tree; `name` is the path of its root in the stream."""
    pieces = _pieces(source, name)
    reading: asyncio.Task[bytes | None] | None = None
    try:
        while True:
            reading = asyncio.get_running_loop().create_task(asyncio.to_thread(next, pieces, None))
            piece = await asyncio.shield(reading)
            if piece is None:
                break
            yield piece
    finally:
        # Nobody waits any more; but a generator cannot be closed while a thread is in it.
        if reading is None or reading.done():
            pieces.close()
        else:
            reading.add_done_callback(lambda _: pieces.close())


def _pieces(source: Path, name: str) -> Generator[bytes, None, None]:
    """The records, joined or cut to about `PIECE`."""
    waiting = bytearray()
    with contextlib.closing(_records(source, name)) as records:
        for part in records:
            waiting += part
            if len(waiting) >= PIECE:
                yield bytes(waiting)
                waiting.clear()
    yield bytes(waiting + _record("e", "", None, 0))


def _records(source: Path, name: str) -> Generator[bytes, None, None]:
    """Parents first. Another process may change the tree meanwhile: what vanished is left out."""
    parent = os.open(source.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield from _entry_records(parent, source.name or ".", name)
    finally:
        os.close(parent)
    if not is_tree(source):
        return
    prefix = f"{name}/" if name else ""
    for directory, names, files, fd in os.fwalk(source):
        inside = os.path.relpath(directory, source)
        below = prefix + ("" if inside == "." else f"{inside}/")
        for entry in sorted(names + files):
            with contextlib.suppress(FileNotFoundError):
                yield from _entry_records(fd, entry, below + entry)


def _entry_records(parent: int, entry: str, relative: str) -> Iterator[bytes]:
    info = os.stat(entry, dir_fd=parent, follow_symlinks=False)
    if stat.S_ISLNK(info.st_mode):
        target = os.fsencode(os.readlink(entry, dir_fd=parent))
        yield _record("l", relative, info, len(target)) + target
    elif stat.S_ISDIR(info.st_mode):
        yield _record("d", relative, info, 0)
    elif stat.S_ISREG(info.st_mode):
        yield from _file_records(parent, entry, relative)


def _file_records(parent: int, entry: str, relative: str) -> Iterator[bytes]:
    """A file that shrinks while it is read is filled up with zeros: its size was promised."""
    with os.fdopen(os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent), "rb") as file:
        info = os.fstat(file.fileno())
        left = info.st_size
        yield _record("f", relative, info, left)
        while left > 0:
            data = file.read(min(left, PIECE)) or bytes(min(left, PIECE))
            left -= len(data)
            yield data


async def unpack_local(
    stream: AsyncIterator[bytes],
    target: Path,
    remote: str,
    limits: TreeLimits | None = None,
    *,
    kind: str = "",
    links: bool = True,
) -> None:
    """Write a downloaded file or tree to `target`; a file goes inside a folder that is there already.

    With `kind` (`f` or `d`) anything else is refused. Without `links` those that lead out of the tree, or may, are left
    out: for trees whose files are read here afterwards.
    """
    writer = TreeWriter(target, remote, limits or TreeLimits(), kind=kind, links=links)
    await _feed(writer, stream)


async def unpack_layer(stream: AsyncIterator[bytes], folder: str, target: Path, limits: TreeLimits) -> None:
    """Write one folder of the first layer of an exported snapshot to `target`."""
    writer = TreeWriter(target, folder, limits, kind="d", links=True, prefix=folder)
    await _feed(writer, _layer_parts(stream))


async def _feed(writer: TreeWriter, stream: AsyncIterator[bytes]) -> None:
    try:
        async for data in stream:
            if not writer.ended:
                await asyncio.to_thread(writer.feed, data)
        if not writer.ended:
            raise ProtocolError("the download ended too early")
    finally:
        await asyncio.to_thread(writer.finish)


async def _layer_parts(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of the first layer of an exported snapshot."""
    buffer = bytearray()
    wanted: tuple[bytes, int] | None = None
    done = False
    async for data in stream:
        buffer += data
        while not done:
            if wanted is None and len(buffer) >= LAYER_RECORD.size:
                wanted = LAYER_RECORD.unpack_from(buffer)
                del buffer[: LAYER_RECORD.size]
            if wanted is None or len(buffer) < wanted[1]:
                break
            (kind, size), wanted = wanted, None
            content = bytes(buffer[:size])
            del buffer[:size]
            done = kind == b"n"
            if kind == b"d":
                yield content
    if not done:
        raise ProtocolError("the snapshot ended too early")


class TreeWriter:
    """Writes a stream of records below one folder. Blocking: its calls belong in a thread, one at a time."""

    def __init__(
        self, target: Path, remote: str, limits: TreeLimits, *, kind: str, links: bool, prefix: str = ""
    ) -> None:
        self._target = target
        self._remote = remote
        self._limits = limits
        self._kind = kind
        self._links = links
        self._prefix = prefix
        self._buffer = bytearray()
        self._root = -1
        self._way: list[tuple[str, int]] = []
        """Open folders from the root down to where the last entry went: entries come in the order of a walk."""
        self._folders: list[tuple[list[str], int, int]] = []
        self._entries = self._size = self._names = 0
        self.ended = False
        self._parser = self._parse()
        next(self._parser)

    def feed(self, data: bytes) -> None:
        try:
            self._parser.send(data)
        except StopIteration:
            self.ended = True

    def finish(self) -> None:
        """Set mode and time of the folders and close everything. Last, and children first: a read-only folder must
        still be filled, and filling it changes its time."""
        self._parser.close()
        try:
            for parts, mode, mtime_ns in reversed(self._folders):
                fd = self._enter(parts)
                os.fchmod(fd, mode & 0o777)
                os.utime(fd, ns=(mtime_ns, mtime_ns))
        finally:
            while self._way:
                os.close(self._way.pop()[1])
            if self._root >= 0:
                os.close(self._root)
                self._root = -1

    def _parse(self) -> Parser:
        while True:
            kind, mode, _, _, mtime_ns, size, length = RECORD.unpack((yield from self._exactly(RECORD.size)))
            if kind == ord("e"):
                return
            if kind == ord("E"):
                raise SandboxFileError(size, f"not a tree that can be copied: {os.strerror(size)}", self._remote)
            path = os.fsdecode((yield from self._exactly(length)))
            self._count(path, size)
            name = self._name(path)
            if name is None or kind in b"puxw":  # a FIFO would block whoever reads it here
                yield from self._skip(size)
            elif kind in b"do":
                self._make_folder(name, mode, mtime_ns)
            elif kind == ord("l"):
                yield from self._make_link(name, size)
            elif kind == ord("h"):
                yield from self._make_hard_link(name, size)
            elif kind in b"fs":
                yield from self._make_file(name, mode, mtime_ns, size, sparse=kind == ord("s"))
            else:
                raise ProtocolError(f"unknown record {chr(kind)!r} in a download")

    def _exactly(self, size: int) -> Parser:
        while len(self._buffer) < size:
            self._buffer += yield
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    def _some(self, limit: int) -> Parser:
        while not self._buffer:
            self._buffer += yield
        data = bytes(self._buffer[:limit])
        del self._buffer[:limit]
        return data

    def _skip(self, size: int) -> Parser:
        while size > 0:
            size -= len((yield from self._some(min(size, BLOCK))))

    def _count(self, path: str, size: int) -> None:
        self._entries += 1
        self._size += size
        self._names += len(path)
        self._check(path.count("/") + 1)

    def _check(self, depth: int = 0) -> None:
        limits = self._limits
        for found, most, what in (
            (self._entries, limits.entries, "entries"),
            (self._size, limits.size, "bytes"),
            (self._names, limits.names, "bytes of names"),
            (depth, limits.depth, "folders inside each other"),
        ):
            if found > most:
                raise SandboxFileError(errno.EFBIG, f"more than {most} {what} in one download", self._remote)

    def _name(self, path: str) -> str | None:
        """The entry's path below the target; None when it is not wanted."""
        if not self._prefix or path == self._prefix:
            return path if not self._prefix else ""
        return path.removeprefix(f"{self._prefix}/") if path.startswith(f"{self._prefix}/") else None

    def _refuse(self, number: int, why: str, name: str) -> SandboxFileError:
        return SandboxFileError(number, why, f"{self._remote}/{name}" if name else self._remote)

    def _make_folder(self, name: str, mode: int, mtime_ns: int) -> None:
        if name == "":
            if self._kind == "f":
                raise self._refuse(errno.EISDIR, os.strerror(errno.EISDIR), name)
            self._target.mkdir(parents=True, exist_ok=True)
            self._root = os.open(self._target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._folders.append(([], mode, mtime_ns))
            return
        parts = self._parts(name)
        parent = self._enter(parts[:-1])
        _clear(parent, parts[-1])
        with contextlib.suppress(FileExistsError):
            os.mkdir(parts[-1], 0o700, dir_fd=parent)
        self._enter(parts)
        self._folders.append((parts, mode, mtime_ns))

    def _make_link(self, name: str, size: int) -> Parser:
        if size > MAX_LINK:
            raise ProtocolError("a link target of more than 4096 bytes")
        link = yield from self._exactly(size)
        if name == "" and self._kind:
            raise self._refuse(errno.ELOOP, "it is a link", name)
        if self._links or stays_inside(os.fsdecode(link), name.count("/")):
            parent, entry = self._place(name)
            _clear(parent, entry)
            os.symlink(link, os.fsencode(entry), dir_fd=parent)

    def _make_hard_link(self, name: str, size: int) -> Parser:
        if size > MAX_PATH:
            raise ProtocolError(f"a path of {size} bytes")
        first = self._name(os.fsdecode((yield from self._exactly(size))))
        if not first:
            raise ProtocolError("another name of a file that is not in this download")
        source, source_entry = self._place(first)
        source = os.dup(source)  # the way to the next place closes it
        try:
            parent, entry = self._place(name)
            _clear(parent, entry)
            os.link(source_entry, entry, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(source)

    def _make_file(self, name: str, mode: int, mtime_ns: int, size: int, *, sparse: bool) -> Parser:
        if name == "" and self._kind == "d":
            raise self._refuse(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
        parent, entry = self._place(name)
        _clear(parent, entry)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(entry, flags, 0o600, dir_fd=parent)
        try:
            if sparse:
                yield from self._fill_extents(fd, size)
            else:
                yield from self._fill(fd, size)
                os.ftruncate(fd, size)
            os.fchmod(fd, mode & 0o777)  # never set-id bits on this side
            os.utime(fd, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(fd)

    def _fill(self, fd: int, left: int) -> Parser:
        while left > 0:
            block = yield from self._some(min(left, BLOCK))
            left -= len(block)
            if block == ZEROS[: len(block)]:
                os.lseek(fd, len(block), os.SEEK_CUR)
            else:
                _write_all(fd, block)

    def _fill_extents(self, fd: int, left: int) -> Parser:
        """The data of a sparse file: its size, then pieces with their places."""
        (whole,) = WHOLE.unpack((yield from self._exactly(WHOLE.size)))
        self._size += whole
        self._check()
        os.ftruncate(fd, whole)
        left -= WHOLE.size
        while left > 0:
            offset, length = EXTENT.unpack((yield from self._exactly(EXTENT.size)))
            left -= EXTENT.size + length
            if left < 0 or offset + length > whole:
                raise ProtocolError("a piece beyond the end of its file")
            os.lseek(fd, offset, os.SEEK_SET)
            yield from self._fill(fd, length)

    def _place(self, name: str) -> tuple[int, str]:
        """Descriptor of the folder that an entry goes into, and its name there."""
        if name:
            parts = self._parts(name)
            return self._enter(parts[:-1]), parts[-1]
        target = self._target
        if target.is_dir():
            target = target / (self._remote.rstrip("/").rpartition("/")[2] or "root")
        target.parent.mkdir(parents=True, exist_ok=True)
        self._root = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._root, target.name

    def _parts(self, name: str) -> list[str]:
        parts = name.split("/")
        if self._root < 0 or any(part in ("", ".", "..") for part in parts):
            raise self._refuse(errno.EINVAL, "path leads out of the download", name)
        return parts

    def _enter(self, parts: list[str]) -> int:
        """Descriptor of a folder below the root; refused when any part of the way is not a folder."""
        common = 0
        for (open_name, _), part in zip(self._way, parts, strict=False):
            if open_name != part:
                break
            common += 1
        while len(self._way) > common:
            os.close(self._way.pop()[1])
        for part in parts[common:]:
            above = self._way[-1][1] if self._way else self._root
            try:
                self._way.append((part, os.open(part, DIRECTORY, dir_fd=above)))
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise self._refuse(errno.ELOOP, "path leads through a link", "/".join(parts)) from None
                raise
        return self._way[-1][1] if self._way else self._root


def stays_inside(link: str, depth: int) -> bool:
    """Whether a link `depth` folders below the root cannot lead out, whatever other links like it are there."""
    parts = link.split("/")
    ups = 0
    while ups < len(parts) and parts[ups] in ("..", ".", ""):
        ups += 1
    return not link.startswith("/") and parts[:ups].count("..") <= depth and ".." not in parts[ups:]


def _clear(parent: int, entry: str) -> None:
    """Make room: what an earlier download left is replaced, but a folder is filled."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.stat(entry, dir_fd=parent, follow_symlinks=False).st_mode):
            os.unlink(entry, dir_fd=parent)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
