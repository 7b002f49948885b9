"""The plain bytes of a layer's blob: gzip, zstd or nothing, with the digests of both sides."""

from __future__ import annotations

import contextlib
import hashlib
import queue
import shutil
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from .layer_archive import PIECE, LayerRefused

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
SMALL_MEMBER = 4096


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
