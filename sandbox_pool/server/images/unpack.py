"""Unpacks one layer of an image, a tar stream, into a folder that overlayfs takes as a lower layer.

A layer comes from anywhere, so all of it is suspect. Everything is done below a descriptor of the folder: a name with
`..`, and a name behind a link that leads out of the layer, is refused, and so is more than `Limits` allows. A whiteout
becomes a device 0:0, an opaque folder gets overlayfs's attribute. Names are bytes, as in the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import shutil
import stat
import struct
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, BinaryIO

Parts = tuple[bytes, ...]
PIECE = 1 << 20
BLOCK = 512
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
SMALL_MEMBER = 4096
OPEN_FOLDERS = 256
LINKS_FOLLOWED = 40
USUAL_IDS = 65_536
NO_ID = (1 << 32) - 1
MOST_TIME_NS = 1 << 63
WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
ATTRIBUTE = b"SCHILY.xattr."
IGNORED_ATTRIBUTE = (errno.ENOTSUP, errno.EPERM, errno.EINVAL)
"""Attributes that this file system or this user cannot set are left out, as engines do."""


class LayerRefused(Exception):
    """The layer is damaged, hostile, or not what its digest says."""


@dataclass(frozen=True)
class Limits:
    """What one layer may take."""

    bytes: int = 64 << 30
    entries: int = 4_000_000
    depth: int = 256
    path: int = 4095
    header: int = 1 << 20
    """Of one extended header: long names and attributes."""


@dataclass
class Entry:
    """One member of the archive."""

    name: bytes
    kind: bytes
    mode: int
    uid: int
    gid: int
    size: int
    mtime_ns: int
    link: bytes = b""
    device: int = 0
    attributes: dict[bytes, bytes] = field(default_factory=dict)
    sparse: list[tuple[int, int]] | None = None
    real_size: int = 0


class Pieces:
    """A byte stream that arrives in pieces of any size, `most` bytes in all: what says nothing inflates as well."""

    def __init__(self, pieces: Iterator[bytes], most: int) -> None:
        self._pieces = pieces
        self._most = self._left = most
        self._view = memoryview(b"")

    def some(self, most: int) -> memoryview:
        """At least one byte, at most `most`; empty at the end."""
        if not self._view and self.at_end():
            return memoryview(b"")
        taken, self._view = self._view[:most], self._view[most:]
        return taken

    def at_end(self) -> bool:
        """Whether nothing more comes."""
        while not self._view:
            piece = next(self._pieces, None)
            if piece is None:
                return True
            self._left -= len(piece)
            if self._left < 0:
                raise LayerRefused(f"more than {self._most >> 20} MiB in one layer")
            self._view = memoryview(piece)
        return False

    def exactly(self, size: int) -> bytes:
        """So many bytes; LayerRefused when the stream ends before."""
        if len(self._view) >= size:
            taken, self._view = self._view[:size], self._view[size:]
            return bytes(taken)
        parts = []
        while size:
            part = self.some(size)
            if not part:
                raise LayerRefused("the layer ends in the middle of an entry")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def write_to(self, fd: int, size: int) -> None:
        """The next bytes, into a file."""
        while size:
            part = self.some(size)
            if not part:
                raise LayerRefused("the layer ends in the middle of a file")
            size -= len(part)
            while part:
                part = part[os.write(fd, part) :]

    def skip(self, size: int) -> None:
        """Drop so many bytes."""
        while size:
            part = self.some(size)
            if not part:
                raise LayerRefused("the layer ends in the middle of an entry")
            size -= len(part)

    def drain(self) -> None:
        """To the end, for the digest; archives are padded as their writers like."""
        while self.some(PIECE):
            pass


def _number(text: bytes) -> int:
    """Octal, or base 256 when the first bit is set."""
    if text[0] & 0x80:
        return int.from_bytes(text[1:], "big") - (1 << 8 * (len(text) - 1) if text[0] & 0x40 else 0)
    digits = text.strip(b" \0").split(b"\0", 1)[0]
    try:
        return int(digits, 8) if digits else 0
    except ValueError:
        raise LayerRefused(f"not a number in a header: {text!r}") from None


_HEADER = struct.Struct("100s8s8s8s12s12s8sc100s8s32s32s8s8s155s12x")


class Archive:
    """Entries of a tar stream: ustar, GNU and pax."""

    def __init__(self, pieces: Pieces, limits: Limits) -> None:
        self._pieces = pieces
        self._limits = limits
        self._global: dict[bytes, bytes] = {}
        self.left = 0
        """Bytes of the current entry's data that nobody has read yet, padding included."""

    def __iter__(self) -> Iterator[Entry]:
        pax: list[tuple[bytes, bytes]] = []
        long_name = long_link = b""
        while True:
            block = self._next_block()
            if block is None:
                return
            entry = self._parse(block)
            if entry.kind in b"xg":
                records = _pax_records(self._extension(entry))
                if entry.kind == b"x":
                    pax = records
                else:
                    self._add_global(records)
                continue
            if entry.kind in b"LK":
                text = self._extension(entry).split(b"\0", 1)[0]
                long_name, long_link = (text, long_link) if entry.kind == b"L" else (long_name, text)
                continue
            if entry.kind == b"S":
                self._old_sparse(entry, block)
            entry.name, entry.link = long_name or entry.name, long_link or entry.link
            self._apply_pax(entry, pax)
            pax, long_name, long_link = [], b"", b""
            if entry.kind == b"\0" and entry.name.endswith(b"/"):
                entry.kind = b"5"  # as before tar had types
            if not (0 <= entry.uid < NO_ID and 0 <= entry.gid < NO_ID and abs(entry.mtime_ns) < MOST_TIME_NS):
                raise LayerRefused(f"{os.fsdecode(entry.name)[:200]!r} has an owner or a time that no file can have")
            if b"\0" in b"".join([entry.link, *entry.attributes]):
                raise LayerRefused("a name that holds a NUL byte")
            if entry.kind in b"123456":
                entry.size = 0
            self.left = entry.size + -entry.size % BLOCK
            yield entry
            self._pieces.skip(self.left)

    def _next_block(self) -> bytes | None:
        """None at the end, which not every writer marks by empty blocks; a layer that was cut has another digest."""
        if self._pieces.at_end():
            return None
        block = self._pieces.exactly(BLOCK)
        return block if block.count(0) != BLOCK else None

    def _parse(self, block: bytes) -> Entry:
        fields = _HEADER.unpack(block)
        name, mode, uid, gid, size, mtime, checksum, kind, link, magic, _, _, major, minor, prefix = fields
        if sum(block) - sum(checksum) + 8 * 32 != _number(checksum):
            raise LayerRefused("the checksum of a header is wrong")
        name = name.split(b"\0", 1)[0]
        if magic == b"ustar\x0000" and prefix[0]:
            name = prefix.split(b"\0", 1)[0] + b"/" + name
        device = 0
        if kind in b"34":
            device = os.makedev(_number(major) & 0xFFF, _number(minor) & 0xFFFFF)
        bytes_of_data = _number(size)
        if bytes_of_data < 0:
            raise LayerRefused("a file of negative size")
        link = link.split(b"\0", 1)[0]
        return Entry(
            name, kind, _number(mode) & 0o7777, _number(uid), _number(gid), bytes_of_data, _number(mtime) * 10**9,
            link, device,
        )  # fmt: skip

    def _extension(self, entry: Entry) -> bytes:
        if entry.size > self._limits.header:
            raise LayerRefused(f"an extended header of {entry.size} bytes")
        data = self._pieces.exactly(entry.size)
        self._pieces.skip(-entry.size % BLOCK)
        return data

    def _old_sparse(self, entry: Entry, block: bytes) -> None:
        """GNU's own form: the map is in the header and in blocks that follow it."""
        pairs = _sparse_pairs(block[386:482])
        entry.real_size, more = _number(block[483:495]), block[482]
        while more:
            if len(pairs) > 100_000:
                raise LayerRefused("a sparse file of more than 100,000 pieces")
            block = self._pieces.exactly(BLOCK)
            pairs += _sparse_pairs(block[:504])
            more = block[504]
        entry.sparse = pairs

    def _add_global(self, records: list[tuple[bytes, bytes]]) -> None:
        self._global.update(records)
        if sum(map(len, [*self._global, *self._global.values()])) > self._limits.header:
            raise LayerRefused(f"global headers of more than {self._limits.header} bytes")

    def _apply_pax(self, entry: Entry, records: list[tuple[bytes, bytes]]) -> None:
        facts = {**self._global, **dict(records)}
        if not facts:
            return
        try:
            entry.name = facts.get(b"path", entry.name)
            entry.link = facts.get(b"linkpath", entry.link)
            entry.uid, entry.gid = int(facts.get(b"uid", entry.uid)), int(facts.get(b"gid", entry.gid))
            entry.size = int(facts.get(b"size", entry.size))
            if b"mtime" in facts:
                time_ns = Decimal(facts[b"mtime"].decode("ascii")) * 10**9
                entry.mtime_ns = int(time_ns) if abs(time_ns) < MOST_TIME_NS else MOST_TIME_NS
            self._pax_sparse(entry, facts, records)
        except (ValueError, ArithmeticError, KeyError) as error:
            raise LayerRefused(f"an extended header cannot be read: {error}") from None
        if entry.size < 0:
            raise LayerRefused("a file of negative size")
        for key, value in facts.items():
            if key.startswith(ATTRIBUTE):
                entry.attributes[key[len(ATTRIBUTE) :]] = value

    def _pax_sparse(self, entry: Entry, facts: dict[bytes, bytes], records: list[tuple[bytes, bytes]]) -> None:
        entry.name = facts.get(b"GNU.sparse.name", entry.name)
        if b"GNU.sparse.map" in facts:
            numbers = [int(text) for text in facts[b"GNU.sparse.map"].split(b",")]
            entry.sparse = _paired(numbers)
            entry.real_size = int(facts[b"GNU.sparse.size"])
        elif b"GNU.sparse.offset" in facts:
            offsets = [int(value) for key, value in records if key == b"GNU.sparse.offset"]
            lengths = [int(value) for key, value in records if key == b"GNU.sparse.numbytes"]
            numbers = [number for pair in zip(offsets, lengths) for number in pair]  # noqa: B905 - Python 3.9
            entry.sparse, entry.real_size = _paired(numbers), int(facts[b"GNU.sparse.size"])
        elif facts.get(b"GNU.sparse.major") == b"1":
            entry.real_size = int(facts[b"GNU.sparse.realsize"])
            entry.sparse = self._map_in_data(entry)

    def _map_in_data(self, entry: Entry) -> list[tuple[int, int]]:
        """Version 1.0 of pax: decimal lines at the head of the data, padded to a block."""
        text = b""
        wanted = -1
        while wanted < 0 or text.count(b"\n") < 1 + 2 * wanted:
            if len(text) > self._limits.header or len(text) + BLOCK > entry.size:
                raise LayerRefused("the map of a sparse file is too long")
            text += self._pieces.exactly(BLOCK)
            if wanted < 0 and b"\n" in text:
                wanted = int(text.split(b"\n", 1)[0])
        entry.size -= len(text)
        numbers = [int(line) for line in text.split(b"\n")[1 : 1 + 2 * wanted]]
        return _paired(numbers)


def _paired(numbers: list[int]) -> list[tuple[int, int]]:
    return [(numbers[at], numbers[at + 1]) for at in range(0, len(numbers) - 1, 2)]


def _sparse_pairs(block: bytes) -> list[tuple[int, int]]:
    pairs = [(_number(block[at : at + 12]), _number(block[at + 12 : at + 24])) for at in range(0, len(block), 24)]
    return [pair for pair in pairs if pair[1]]


def _pax_records(data: bytes) -> list[tuple[bytes, bytes]]:
    records = []
    position = 0
    while position < len(data):
        space = data.find(b" ", position, position + 20)
        try:
            length = int(data[position:space]) if space > 0 else 0
        except ValueError:
            length = 0
        record = data[space + 1 : position + length]
        if length <= 0 or position + length > len(data) or not record.endswith(b"\n"):
            raise LayerRefused("an extended header cannot be read")
        key, _, value = record[:-1].partition(b"=")
        records.append((key, value))
        position += length
    return records


def path_parts(name: bytes) -> Parts:
    """A name of the archive as folders and file; `..` is refused."""
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise LayerRefused(f"a name that leaves the image: {os.fsdecode(name)[:200]!r}")
    if any(b"\0" in part for part in parts):
        raise LayerRefused("a name that holds a NUL byte")
    return parts


class Unpacker:
    """Writes entries below one folder. As root of a user namespace what only the host's root may do is left out."""

    def __init__(
        self, root: int, pieces: Pieces, limits: Limits, overlay: str, *, one_user: bool, devices: bool
    ) -> None:
        self._root = root
        self._pieces = pieces
        self._limits = limits
        self._opaque = f"{overlay}.overlay.opaque"
        self._one_user = one_user
        """Only one id can be given to files: others' become ours, as engines without id ranges have it."""
        self._devices = devices
        self._archive = Archive(pieces, limits)
        self._open: dict[Parts, int] = {}
        self._real: dict[Parts, Parts] = {}
        """Where open folders are whose names lead through links."""
        self._folder_times: dict[Parts, int] = {}
        self._current: Parts = ()
        self._set_group_seen = False
        self.implied: set[Parts] = set()
        """Folders that something was put into and that no entry names."""
        self.links: dict[Parts, Parts] = {}
        """Hard links to files that layers below must have."""
        self.whiteouts: dict[Parts, set[bytes]] = {}
        """By their folders."""
        self.root = ""
        """What the layer says of the image's root: nothing, that it is `plain`, or that it has modes of its `own`."""
        self.high_ids: set[int] = set()
        """Owners beyond the ids that a slot has anyway."""
        self._ids = os.geteuid(), os.getegid()
        self.entries = self.bytes = 0

    def run(self) -> None:
        """All entries; the stream is then at its end."""
        try:
            for entry in self._archive:
                self._count(entry)
                self._take(entry)
                if len(self._open) > OPEN_FOLDERS:
                    self._close_folders()
            self._pieces.drain()
            self._drop_idle_whiteouts()
            for parts, mtime_ns in reversed(self._folder_times.items()):
                with contextlib.suppress(LayerRefused, OSError):
                    os.utime(self._folder(parts), ns=(mtime_ns, mtime_ns))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise LayerRefused(f"an entry cannot be made: {error.strerror} {error.filename!r}") from error
        finally:
            self._close_folders()

    def _count(self, entry: Entry) -> None:
        self.entries += 1
        self.bytes += entry.size
        if self.entries > self._limits.entries:
            raise LayerRefused(f"more than {self._limits.entries} entries in one layer")
        if self.bytes > self._limits.bytes:
            raise LayerRefused(f"more than {self._limits.bytes >> 20} MiB in one layer")

    def _take(self, entry: Entry) -> None:
        parts = path_parts(entry.name)
        if len(parts) > self._limits.depth or len(entry.name) > self._limits.path:
            raise LayerRefused(f"a path of {len(parts)} folders and {len(entry.name)} bytes")
        if not parts:
            if entry.kind == b"5":
                self._dress(self._root, entry)
                self._folder_times[()] = entry.mtime_ns
                is_plain = (entry.mode, entry.uid, entry.gid, entry.attributes) == (0o755, 0, 0, {})
                self.root = "plain" if is_plain else "own"
            return
        self._current = parts
        parent, name = self._folder(parts[:-1]), parts[-1]
        if name.startswith(WHITEOUT):
            self._white_out(parent, name)
            return
        self.links.pop(parts, None)
        if entry.kind in b"0\x007S":
            self._file(parent, name, entry)
        elif entry.kind == b"5":
            self._make_folder(parent, parts, entry)
        elif entry.kind == b"1":
            self._hard_link(parent, name, entry)
        elif entry.kind in b"2346":
            self._special(parent, name, entry)
        else:
            raise LayerRefused(f"an entry of unknown kind {entry.kind!r}")

    def _folder(self, parts: Parts, followed: int = 0, *, make: bool = True) -> int:
        """A descriptor of the folder, made where it is missing."""
        if not parts:
            return self._root
        fd = self._open.get(parts)
        if fd is None:
            fd = self._enter(self._folder(parts[:-1], followed, make=make), parts, followed, make)
            self._open[parts] = fd
        return fd

    def _enter(self, parent: int, parts: Parts, followed: int, make: bool) -> int:
        name = parts[-1]
        if parts[:-1] in self._real:
            self._real[parts] = (*self._real[parts[:-1]], name)
            if len(self._real[parts]) > self._limits.depth:
                raise LayerRefused(f"a path of {len(self._real[parts])} folders behind links")
        try:
            return os.open(name, FOLDER, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
            os.mkdir(name, 0o755, dir_fd=parent)
            self.implied.add(self._real.get(parts, parts))
            return os.open(name, FOLDER, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
        info = os.lstat(name, dir_fd=parent)
        if _is_whiteout(info) and make:
            return self._replace_whiteout(parent, name)
        if not stat.S_ISLNK(info.st_mode):
            raise LayerRefused(f"an entry below {_shown(parts)}, which is not a folder")
        self._real[parts] = self._follow(parts, os.readlink(name, dir_fd=parent), followed)
        return os.dup(self._folder(self._real[parts]))

    def _follow(self, parts: Parts, target: bytes, followed: int) -> Parts:
        """The folder that a link leads to, seen from the image's root: one of the layer, or one below the link."""
        strict = target.startswith(b"/") or b".." in target.split(b"/")
        reached = () if target.startswith(b"/") else self._real.get(parts[:-1], parts[:-1])
        for name in target.split(b"/"):
            if name in (b"", b"."):
                continue
            if followed >= LINKS_FOLLOWED or (name == b".." and not reached):
                raise self._leads_elsewhere(parts)
            if name == b"..":
                reached = reached[:-1]
                continue
            try:
                self._folder((*reached, name), followed + 1, make=not strict)
            except FileNotFoundError:
                raise self._leads_elsewhere(parts) from None
            reached = self._real.get((*reached, name), (*reached, name))
        return reached

    @staticmethod
    def _leads_elsewhere(parts: Parts) -> LayerRefused:
        return LayerRefused(f"an entry behind the link {_shown(parts)}, which leads elsewhere")

    def _replace_whiteout(self, parent: int, name: bytes) -> int:
        os.unlink(name, dir_fd=parent)
        os.mkdir(name, 0o755, dir_fd=parent)
        fd = os.open(name, FOLDER, dir_fd=parent)
        os.setxattr(fd, self._opaque, b"y")
        return fd

    def _close_folders(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        self._real.clear()

    def _white_out(self, parent: int, name: bytes) -> None:
        if name == OPAQUE:
            os.setxattr(parent, self._opaque, b"y")
            return
        hidden = name[len(WHITEOUT) :]
        if hidden.startswith(WHITEOUT):
            return  # records of aufs
        if hidden in (b"", b".", b".."):
            raise LayerRefused(f"a whiteout of {hidden!r}")
        try:
            info = os.lstat(hidden, dir_fd=parent)
        except FileNotFoundError:
            try:
                os.mknod(hidden, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=parent)
            except PermissionError:
                raise OSError(errno.ENOSPC, "this file system takes no whiteouts; keep images elsewhere") from None
            folder = self._current[:-1]
            self.whiteouts.setdefault(self._real.get(folder, folder), set()).add(hidden)
            return
        # What this layer itself brings stays; only what lies below it is hidden.
        if stat.S_ISDIR(info.st_mode):
            fd = os.open(hidden, FOLDER, dir_fd=parent)
            try:
                os.setxattr(fd, self._opaque, b"y")
            finally:
                os.close(fd)

    def _drop_idle_whiteouts(self) -> None:
        """Below an opaque folder there is nothing to hide, and a whiteout of nothing is listed as a broken name."""
        for parts in list(self.whiteouts):
            try:
                opaque = any(self._is_opaque(self._folder(parts[:n], make=False)) for n in range(len(parts) + 1))
                for name in self.whiteouts[parts] if opaque else ():
                    if _is_whiteout(os.lstat(name, dir_fd=self._folder(parts, make=False))):
                        os.unlink(name, dir_fd=self._folder(parts, make=False))
            except (FileNotFoundError, LayerRefused):  # replaced by a later entry
                opaque = True
            if opaque:
                del self.whiteouts[parts]

    def _is_opaque(self, folder: int) -> bool:
        with contextlib.suppress(OSError):
            return os.getxattr(folder, self._opaque) == b"y"
        return False

    def _file(self, parent: int, name: bytes, entry: Entry) -> None:
        try:
            fd = os.open(name, NEW_FILE, 0o600, dir_fd=parent)
        except FileExistsError:
            self._clear(parent, name)
            fd = os.open(name, NEW_FILE, 0o600, dir_fd=parent)
        try:
            if entry.sparse is None:
                self._pieces.write_to(fd, entry.size)
            else:
                self._write_sparse(fd, entry)
            self._archive.left -= entry.size
            self._dress(fd, entry)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)

    def _write_sparse(self, fd: int, entry: Entry) -> None:
        left = entry.size
        for offset, length in entry.sparse or ():
            if length > left or offset < 0 or length < 0 or offset + length > entry.real_size:
                raise LayerRefused("the map of a sparse file does not fit its data")
            os.lseek(fd, offset, os.SEEK_SET)
            self._pieces.write_to(fd, length)
            left -= length
        self._pieces.skip(left)
        os.ftruncate(fd, entry.real_size)

    def _make_folder(self, parent: int, parts: Parts, entry: Entry) -> None:
        name = parts[-1]
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            info = os.lstat(name, dir_fd=parent)
            if _is_whiteout(info):
                os.close(self._replace_whiteout(parent, name))
            elif not stat.S_ISDIR(info.st_mode):
                self._clear(parent, name)
                os.mkdir(name, 0o755, dir_fd=parent)
        self._dress(self._folder(parts), entry)
        self._folder_times[parts] = entry.mtime_ns
        self.implied.discard(parts)

    def _hard_link(self, parent: int, name: bytes, entry: Entry) -> None:
        target = path_parts(entry.link)
        if not target:
            raise LayerRefused("a hard link to the root")
        try:
            other = self._folder(target[:-1], make=False)
            if other == parent and target[-1] == name:
                return
            try:
                os.link(target[-1], name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
            except FileExistsError:
                os.lstat(target[-1], dir_fd=other)  # only then
                self._clear(parent, name)
                other = self._folder(target[:-1], make=False)
                os.link(target[-1], name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError):
                self._clear(parent, name)
            self.links[self._current] = self.links.get(target, target)

    def _special(self, parent: int, name: bytes, entry: Entry) -> None:
        if entry.kind in b"34" and not self._devices:
            return
        try:
            self._make_special(parent, name, entry)
        except FileExistsError:
            self._clear(parent, name)
            self._make_special(parent, name, entry)
        if self._must_own(entry):
            with self._owner_errors(entry):
                os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
        path = os.path.join(b"/proc/self/fd/%d" % parent, name)
        if entry.kind != b"2":
            os.chmod(path, entry.mode)
        for key, value in entry.attributes.items():
            self._set_attribute(path, key, value)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)

    @staticmethod
    def _make_special(parent: int, name: bytes, entry: Entry) -> None:
        if entry.kind == b"2":
            os.symlink(entry.link, name, dir_fd=parent)
        else:
            kind = {b"3": stat.S_IFCHR, b"4": stat.S_IFBLK, b"6": stat.S_IFIFO}[entry.kind]
            os.mknod(name, kind | 0o600, entry.device, dir_fd=parent)

    def _dress(self, fd: int, entry: Entry) -> None:
        """Owner, mode and attributes, in the order in which one does not undo the other."""
        if self._must_own(entry):
            with self._owner_errors(entry):
                os.fchown(fd, entry.uid, entry.gid)
        os.fchmod(fd, entry.mode)
        if entry.kind == b"5" and entry.mode & stat.S_ISGID:
            self._set_group_seen = True
        for key, value in entry.attributes.items():
            self._set_attribute(fd, key, value)

    def _must_own(self, entry: Entry) -> bool:
        self.high_ids.update(number for number in (entry.uid, entry.gid) if number >= USUAL_IDS)
        return (entry.uid, entry.gid) != self._ids or self._set_group_seen

    @contextlib.contextmanager
    def _owner_errors(self, entry: Entry) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EPERM):
                raise
            if not self._one_user:
                owner = f"{entry.uid}:{entry.gid}, whose ids this user of the host may not use (see /etc/subuid)"
                raise LayerRefused(f"{os.fsdecode(entry.name)[:200]!r} belongs to {owner}") from None

    def _set_attribute(self, where: int | bytes, key: bytes, value: bytes) -> None:
        if b".overlay." in key:
            return  # would tell our own overlay what to show
        try:
            os.setxattr(where, key, value, follow_symlinks=isinstance(where, int))
        except OSError as error:
            if error.errno not in IGNORED_ATTRIBUTE:
                raise

    def _clear(self, parent: int, name: bytes) -> None:
        """A later entry of the same name replaces an earlier one."""
        mode = os.lstat(name, dir_fd=parent).st_mode
        if stat.S_ISDIR(mode):
            keep = os.dup(parent)
            try:
                _remove_folder(keep, name)
            finally:
                os.close(keep)
            here = self._current
            self.implied = {parts for parts in self.implied if parts[: len(here)] != here}
            self.links = {parts: target for parts, target in self.links.items() if parts[: len(here)] != here}
            self._folder_times = {
                parts: time for parts, time in self._folder_times.items() if parts[: len(here)] != here
            }
        else:
            os.unlink(name, dir_fd=parent)
        if stat.S_ISDIR(mode) or stat.S_ISLNK(mode):  # open folders may have been reached through it, by any name
            for parts in [parts for parts, fd in self._open.items() if fd != parent]:
                os.close(self._open.pop(parts))
                self._real.pop(parts, None)


def _shown(parts: Parts) -> str:
    return repr(os.fsdecode(b"/".join(parts))[:200])


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _remove_folder(parent: int, name: bytes) -> None:
    fd = os.open(name, FOLDER, dir_fd=parent)
    try:
        with os.scandir(fd) as entries:
            found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
        for child, is_folder in found:
            if is_folder:
                _remove_folder(fd, child)
            else:
                os.unlink(child, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


class Inflated:
    """The plain bytes of a blob, inflated in a thread of its own; both digests are taken on the way."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._queue: queue.Queue[bytes | Exception | None] = queue.Queue(maxsize=8)
        self._stopped = False
        self.packed, self.plain = hashlib.sha256(), hashlib.sha256()
        self.packed_bytes = 0
        self._thread = threading.Thread(target=self._produce, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[bytes]:
        while True:
            piece = self._queue.get()
            if piece is None:
                return
            if isinstance(piece, Exception):
                raise piece
            self.plain.update(piece)
            yield piece

    def close(self) -> None:
        """Nothing more is wanted; a thread that waits for its source ends with the process."""
        self._stopped = True

    def _read(self) -> bytes:
        data = self._source.read(PIECE)
        self.packed.update(data)
        self.packed_bytes += len(data)
        return b"" if self._stopped else data

    def _produce(self) -> None:
        try:
            first = self._read()
            if first.startswith(GZIP):
                self._gunzip(first)
            elif first.startswith(ZSTD):
                self._unzstd(first)
            else:
                while first:
                    self._queue.put(first)
                    first = self._read()
            self._queue.put(None)
        except Exception as error:  # noqa: BLE001 - told to the thread that unpacks
            self._queue.put(error)

    def _gunzip(self, first: bytes) -> None:
        """Members one after the other. What follows the end of one is copied: of each so much more is tried at once."""
        inflater, between, step = zlib.decompressobj(31), False, SMALL_MEMBER
        data = memoryview(first)
        try:
            while data:
                tried = data[:step]
                if between and data[0] == 0:  # padding
                    rest = len(bytes(tried).lstrip(b"\0"))
                else:
                    self._queue.put(inflater.decompress(tried, PIECE))
                    between = inflater.eof
                    rest = len(inflater.unused_data if between else inflater.unconsumed_tail)
                    inflater = zlib.decompressobj(31) if between else inflater
                    step = SMALL_MEMBER if between else min(2 * step, PIECE)
                data = data[len(tried) - rest :] or memoryview(self._read())
            if not between:
                self._queue.put(inflater.flush())
                between = inflater.eof
        except zlib.error as error:
            raise LayerRefused(f"the compressed data is damaged: {error}") from None
        if not between and not self._stopped:
            raise LayerRefused("the compressed data ends too early")

    def _unzstd(self, data: bytes) -> None:
        reader = zstd_reader(_Resumed(data, self._read))
        if reader is None:
            self._unzstd_by_program(data)
            return
        try:
            while True:
                piece = reader.read(PIECE)
                if not piece:
                    return
                self._queue.put(piece)
        except Exception as error:  # noqa: BLE001 - each library has its own
            raise LayerRefused(f"the compressed data is damaged: {error}") from None

    def _unzstd_by_program(self, data: bytes) -> None:
        program = shutil.which("zstd")
        if program is None:
            raise LayerRefused("the layer is compressed with zstd: install the program zstd or the package zstandard")
        process = subprocess.Popen([program, "-dcq"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdin is not None
        assert process.stdout is not None
        feeder = threading.Thread(target=self._feed, args=(process.stdin, data), daemon=True)
        feeder.start()
        while True:
            piece = process.stdout.read(PIECE)
            if not piece or self._stopped:
                break
            self._queue.put(piece)
        process.stdout.close()
        feeder.join()
        if process.wait() and not self._stopped:
            raise LayerRefused("the compressed data is damaged")

    def _feed(self, target: BinaryIO, data: bytes) -> None:
        with contextlib.suppress(OSError):
            while data:
                target.write(data)
                data = self._read()
        while self._read():
            pass
        with contextlib.suppress(OSError):
            target.close()


class _Resumed:
    """A file whose first bytes were read already."""

    def __init__(self, first: bytes, read: Callable[[], bytes]) -> None:
        self._rest = first
        self._more = read

    def read(self, size: int = -1) -> bytes:
        if not self._rest:
            self._rest = self._more()
        size = len(self._rest) if size < 0 else size
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def zstd_reader(source: Any) -> Any:
    """A reader of the standard library (3.14) or of `zstandard`; None where there is neither."""
    with contextlib.suppress(ImportError):
        from compression import zstd  # type: ignore[import-not-found,unused-ignore]

        return zstd.ZstdFile(source)
    with contextlib.suppress(ImportError):
        import zstandard  # type: ignore[import-not-found,unused-ignore]

        return zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True)
    return None


def unpack_layer(
    source: BinaryIO,
    target: str,
    *,
    digest: str | None,
    diff_id: str,
    limits: Limits,
    overlay: str,
    one_user: bool = False,
    devices: bool = True,
) -> Unpacker:
    """Unpack a blob into an empty folder. `digest` is the blob's, `diff_id` that of the plain archive in it."""
    inflated = Inflated(source)
    root = os.open(target, FOLDER)
    try:
        pieces = Pieces(iter(inflated), limits.bytes)
        work = Unpacker(root, pieces, limits, overlay, one_user=one_user, devices=devices)
        work.run()
    finally:
        os.close(root)
        inflated.close()
    for name, wanted, found in (("blob", digest, inflated.packed), ("layer", diff_id, inflated.plain)):
        if wanted is not None and wanted != f"sha256:{found.hexdigest()}":
            raise LayerRefused(f"the {name} {wanted[:23]}... has the digest sha256:{found.hexdigest()[:16]}...")
    return work
