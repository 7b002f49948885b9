"""Shared memory, semaphores and message queues of one user: what a slot without an IPC namespace leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import os

from ..host_files import remove_tree

DIRECTORIES = ("/dev/shm", "/dev/mqueue")
SYSTEM_V = (("shm", "shmid"), ("sem", "semid"), ("msg", "msqid"))
IPC_RMID = 0


def remove_shared_of(uid: int) -> list[str]:
    """Remove them all; returns what is still there."""
    for path in _files_of(uid):
        remove_tree(path)
    libc = ctypes.CDLL(None)
    for kind, number in _objects_of(uid):
        if kind == "sem":
            libc.semctl(number, 0, IPC_RMID)
        else:
            getattr(libc, f"{kind}ctl")(number, IPC_RMID, None)
    return [*_files_of(uid), *(f"{kind} {number}" for kind, number in _objects_of(uid))]


def _files_of(uid: int) -> list[str]:
    found = []
    for directory in DIRECTORIES:
        with contextlib.suppress(OSError), os.scandir(directory) as entries:
            found += [entry.path for entry in entries if entry.stat(follow_symlinks=False).st_uid == uid]
    return found


def _objects_of(uid: int) -> list[tuple[str, int]]:
    """System V objects by kind and number, as the kernel lists them; none where it has no such list."""
    found = []
    for kind, column in SYSTEM_V:
        with contextlib.suppress(OSError), open(f"/proc/sysvipc/{kind}") as table:
            names, *rows = [line.split() for line in table]
            number, owner, maker = (names.index(name) for name in (column, "uid", "cuid"))

            found += [(kind, int(row[number])) for row in rows if uid in (int(row[owner]), int(row[maker]))]
    return found
