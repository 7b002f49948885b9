"""Removes whatever an earlier server with the same scratch directory left: processes, cgroups, directories.

Mounts and network namespaces need no removal: slots make them in their own namespaces, which end with their processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time

from .isolation.cgroups import Cgroups
from .isolation.layers import remove_layers_dir
from .remove_tree import remove_tree

RECORD = "server.json"
WAIT_S = 10.0


def start_ticks(pid: int) -> int | None:
    """Start time of a process, which with its number identifies it; None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def write_record(scratch: str, pids: list[int]) -> None:
    """So that a later server or `--cleanup` finds these processes."""
    path = os.path.join(scratch, RECORD)
    with open(f"{path}.new", "w") as file:
        json.dump([[pid, start_ticks(pid)] for pid in pids], file)
    os.replace(f"{path}.new", path)


def _end_recorded(scratch: str) -> list[str]:
    try:
        with open(os.path.join(scratch, RECORD)) as file:
            recorded = json.load(file)
    except (OSError, ValueError):
        return []
    alive = [(int(pid), ticks) for pid, ticks in recorded if int(pid) != os.getpid() and start_ticks(int(pid)) == ticks]
    for pid, _ in alive:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + WAIT_S
    while any(start_ticks(pid) == ticks for pid, ticks in alive) and time.monotonic() < deadline:
        time.sleep(0.005)
    return [f"process {pid} did not end" for pid, ticks in alive if start_ticks(pid) == ticks]


def clean(scratch: str) -> list[str]:
    """Remove leftovers; returns what could not be removed."""
    problems = _end_recorded(scratch)
    problems += [f"cgroup {path} is still there" for path in Cgroups(scratch).remove()]
    remove_layers_dir(scratch)
    for name in ("slots", "run", "layers", "helper"):
        problems += [f"{path} is still there" for path in remove_tree(os.path.join(scratch, name))]
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(scratch, RECORD))
    return problems
