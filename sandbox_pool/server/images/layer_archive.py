"""Reads the tar stream of a layer, member by member: ustar, GNU's and POSIX' extensions, sparse files.

Names are bytes, as in the kernel. What is damaged, larger than `Limits` allow, or leaves the image is `LayerRefused`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal

Parts = tuple[bytes, ...]
PIECE = 1 << 20
BLOCK = 512
NO_ID = (1 << 32) - 1
MOST_TIME_NS = 1 << 63
ATTRIBUTE = b"SCHILY.xattr."


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
