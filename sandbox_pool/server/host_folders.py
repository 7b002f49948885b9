"""The folder of a host on the machine it runs on: where it can be, who owns it, and whether its server still runs.

A host is a folder `<scratch>/hermes-rl-<uid>/<name>/` with a record (`host.json`), the server's scratch space and its
log. Part of the packed server: standard library, Python 3.9.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .cleanup import start_ticks
from .host_files import FOLDER

SLOW = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "gpfs", "ceph", "glusterfs", "9p", "afs"})
"""File systems that are shared over a network, or too slow for layers that live for seconds."""
UNFIT = SLOW | {"overlay", "aufs", "fuse.fuse-overlayfs"}
"""Overlay on overlay does not work either: inside a container, /dev/shm is better."""
OWN_MODE = 0o711 if os.getuid() == 0 else 0o700
"""Root's slots are other users, who keep their layers below: they may enter, but neither list nor write."""
ALIVE = "alive"
"""A file that the slot server holds open as long as it lives. A process that has it open is the one of the record."""
INSTANCE = "instance"
"""In a record: whether the server is in an Apptainer instance, which only its own provider can end."""
RECORD_LIMIT = 100_000
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
SOCKET_PATH_LIMIT = 100
"""Linux allows 107 bytes for the path of a unix socket."""


def candidates() -> list[Path]:
    """Where scratch space is looked for, best first."""
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


def own_name() -> str:
    """Name of this user's folder in a scratch space that users share."""
    return f"hermes-rl-{os.getuid()}"


def is_folder(path: Path) -> bool:
    """Whether it is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def read_record(directory: Path) -> dict[str, Any] | None:
    """What is written about a host; None when nothing can be read, or another user wrote it."""
    try:
        folder = os.open(directory, FOLDER)
    except OSError:
        return None
    try:
        with os.fdopen(os.open("host.json", READ, dir_fd=folder)) as file:
            record = json.loads(file.read(RECORD_LIMIT)) if os.fstat(folder).st_uid == os.geteuid() else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(folder)
    return record if isinstance(record, dict) else None


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Put a new record in the place of the old one."""
    folder = os.open(directory, FOLDER)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(".host.json", dir_fd=folder)
        write_new(folder, ".host.json", json.dumps(record).encode(), 0o600)
        os.rename(".host.json", "host.json", src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def write_new(folder: int, name: str, data: bytes, mode: int) -> None:
    """A file that was not there before, in an open folder."""
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=folder)
    with os.fdopen(fd, "wb") as file:
        os.fchmod(fd, mode)
        file.write(data)


def is_running(directory: Path, record: Mapping[str, Any]) -> bool:
    """Whether the recorded process lives and is proven ours: same number, same start, and it has our file open."""
    pid, ticks = record.get("pid"), record.get("ticks")
    if not isinstance(pid, int) or ticks is None or start_ticks(pid) != ticks:
        return False
    return holds_open(pid, directory / ALIVE)


def holds_open(pid: int, path: Path) -> bool:
    """Whether a process has this file open."""
    try:
        ours = path.lstat()
        opened = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return False
    for descriptor in opened:
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.path.samestat(descriptor.stat(), ours):
                return True
    return False
