"""Finding and killing every descendant of a process; see helper/tree.c for why this finds all of them."""

from __future__ import annotations

import contextlib
import os
import signal
import time


def _parents() -> dict[int, int]:
    """Parent of every living process."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    found[int(name)] = int(fields[1])
    return found


def _below(ancestor: int) -> set[int]:
    parents = _parents()
    below: set[int] = set()
    grown = True
    while grown:
        new = {pid for pid, parent in parents.items() if pid not in below and (parent == ancestor or parent in below)}
        below |= new
        grown = bool(new)
    return below - {ancestor}


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def kill_descendants(ancestor: int) -> int:
    """Stop them until no new one appears, then kill them all."""
    stopped: set[int] = set()
    while True:
        found = _below(ancestor)
        if found <= stopped:
            break
        _signal(found - stopped, signal.SIGSTOP)
        stopped |= found
    for _ in range(100):
        left = _below(ancestor)
        if not left:
            break
        _signal(left, signal.SIGKILL)
        time.sleep(0.001)
    return len(stopped)


def count_processes() -> int:
    """All processes this PID namespace shows."""
    return sum(name.isdigit() for name in os.listdir("/proc"))
