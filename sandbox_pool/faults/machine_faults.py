"""Faults of the machine itself, for the length of a `with` block: a full disk, a clock that jumps."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

LARGEST_FILLED_BYTES = 4 << 30
"""Of free space: more belongs to a disk that others use too."""
PIECE_BYTES = 1 << 20


@contextmanager
def full_disk(folder: Path | str) -> Iterator[None]:
    """The file system of this folder is full inside the block. Use a small one of your own, such as a tmpfs."""
    place = Path(folder)
    free = shutil.disk_usage(place).free
    if free > LARGEST_FILLED_BYTES:
        raise ValueError(f"{place} has {free >> 30} GiB free: fill a small disk of your own, such as a tmpfs")
    filler = place / f".full-disk-{secrets.token_hex(4)}"
    try:
        with filler.open("wb", buffering=0) as file:
            _fill(file.fileno())
        yield
    finally:
        filler.unlink(missing_ok=True)


def _fill(descriptor: int) -> None:
    size, piece = 0, PIECE_BYTES
    while piece:
        try:
            os.posix_fallocate(descriptor, size, piece)
            size += piece
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            piece //= 2


@contextmanager
def jumped_clock(seconds: float) -> Iterator[None]:
    """The date of this process is off by so many seconds inside the block; what measures durations is not."""
    now, now_ns = time.time, time.time_ns
    shifted = mock.patch.multiple(time, time=lambda: now() + seconds, time_ns=lambda: now_ns() + int(seconds * 1e9))
    with shifted:
        yield
