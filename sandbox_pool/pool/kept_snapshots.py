"""Snapshots kept as files of this user, for later runs and other processes.

A file appears under its name only when it is complete, and is never changed afterwards; whoever uses one holds it open,
so it may be removed at any time. A process that is killed leaves an unfinished file without a lock, which the next one
removes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import BinaryIO

from sandbox_pool.errors import StateError
from sandbox_pool.server.host_files import NotPrivate, open_private

log = logging.getLogger(__name__)
COMPLETE, UNFINISHED = ".snapshot", ".part"


class KeptSnapshots:
    """Files by key, up to a size in all; those not used for longest go first."""

    def __init__(self, state_dir: Path, max_mb: int) -> None:
        self._folder = state_dir / "snapshots"
        self._max_bytes = max_mb << 20

    def _private_folder(self) -> Path:
        try:
            os.close(open_private(self._folder, may_be_link=True))
        except NotPrivate as error:
            raise StateError(f"snapshots cannot be kept: {error}") from error
        return self._folder

    def open(self, key: str) -> BinaryIO | None:
        """The snapshot of this key, which counts as used now; None when it is not kept."""
        try:
            file = (self._private_folder() / f"{key}{COMPLETE}").open("rb")
        except FileNotFoundError:
            return None
        os.utime(file.fileno())
        return file

    async def keep(self, key: str, chunks: AsyncIterator[bytes]) -> None:
        """Store what `export_snapshot` gives. One that is larger than all may be is not kept."""
        file, name = await asyncio.to_thread(self._begin)
        try:
            with file:
                async for chunk in chunks:
                    await asyncio.to_thread(file.write, chunk)
                    if file.tell() > self._max_bytes:
                        log.warning("a snapshot of more than %d MB is not kept", self._max_bytes >> 20)
                        return
                file.flush()
                await asyncio.to_thread(os.fsync, file.fileno())
                await asyncio.to_thread(name.rename, self._folder / f"{key}{COMPLETE}")
        finally:
            await asyncio.to_thread(name.unlink, missing_ok=True)
        await asyncio.to_thread(self.trim)

    def _begin(self) -> tuple[BinaryIO, Path]:
        with self._locked(fcntl.LOCK_SH):  # a new file has no lock of its own for a moment
            descriptor, name = tempfile.mkstemp(suffix=UNFINISHED, dir=self._folder)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fdopen(descriptor, "wb"), Path(name)

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        folder = os.open(self._private_folder(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(folder, kind)
            yield
        finally:
            os.close(folder)

    def trim(self) -> int:
        """Remove unfinished files of dead processes, and the oldest ones above the size; the bytes that went."""
        with self._locked(fcntl.LOCK_EX):
            removed = sum(_remove_dead(path) for path in self._files(UNFINISHED))
        kept = sorted(((info.st_mtime_ns, info.st_size, path) for path, info in self._complete()), reverse=True)
        total = 0
        for _, size, path in kept:
            total += size
            if total > self._max_bytes:
                path.unlink(missing_ok=True)
                removed += size
        return removed

    def sizes(self) -> list[int]:
        """Bytes of each file that is kept."""
        return [info.st_size for _, info in self._complete()]

    def _files(self, suffix: str) -> list[Path]:
        return sorted(self._folder.glob(f"*{suffix}"))

    def _complete(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in self._files(COMPLETE):
            with contextlib.suppress(FileNotFoundError):  # another process removed it meanwhile
                found.append((path, path.stat()))
        return found


def _remove_dead(path: Path) -> int:
    """Remove an unfinished file that nobody writes; its size."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(file.fileno()).st_size
            path.unlink()
            return size
    except (BlockingIOError, FileNotFoundError):
        return 0
