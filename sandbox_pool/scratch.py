"""Where slots on this machine keep their layers: a fast local disk with room, never a network file system."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sandbox_pool.errors import ScratchFull

SLOW = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "9p", "afs"})
"""File systems that are shared over a network, or too slow for layers that live for seconds."""
UNFIT = SLOW | {"overlay", "aufs", "fuse.fuse-overlayfs"}
"""Overlay on overlay does not work either: inside a container, /dev/shm is the better place."""


def candidates() -> list[Path]:
    """Places to look at, best first."""
    return [Path("/scratch"), Path(tempfile.gettempdir()), Path("/var/tmp"), Path("/dev/shm")]


def file_system_type(path: Path, mounts: str | None = None) -> str:
    """Type of the file system that holds the path, as /proc/mounts names it."""
    text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    best, kind = "", ""
    real = str(path.resolve())
    for line in text.splitlines():
        fields = line.split(" ")
        point = fields[1].encode().decode("unicode_escape")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, fields[2]
    return kind


def choose_scratch(configured: Path | None, places: Sequence[Path] | None = None) -> Path:
    """The configured place, made if need be; else the first writable local disk."""
    if configured is not None:
        path = configured.expanduser().absolute()
        path.mkdir(parents=True, exist_ok=True)
        return path
    usable = [
        path
        for path in (candidates() if places is None else places)
        if path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    ]
    for path in usable:
        if file_system_type(path) not in UNFIT:
            return path
    if usable:
        return usable[0]
    raise ScratchFull("there is no writable scratch space on this machine: set `scratch_dir`")


def require_space(path: Path, min_mb: int) -> None:
    """Raise `ScratchFull` when less than `min_mb` is free."""
    free_mb = shutil.disk_usage(path).free // 2**20
    if free_mb < min_mb:
        raise ScratchFull(f"scratch space {path} is full: {free_mb} MB free, {min_mb} MB are kept; set `scratch_dir`")
