"""Removes whatever an earlier server with the same scratch directory left: processes, cgroups, directories.

Mounts and network namespaces need no removal: slots make them in their own namespaces, which end with their processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable

from .images.user_ids import remove_mapped
from .isolation.cgroups import Cgroups
from .isolation.layers import remove_layers_dir
from .isolation.levels import RUN_UIDS, mark
from .slots.shell import start

RECORD = "server.json"
WAIT_S = 10.0
RUN_UIDS_ALL = range(RUN_UIDS.start, RUN_UIDS.stop)


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


def _users_of(pid: int) -> set[int]:
    """Real, effective, saved and file system user of a process: more than one for a set-id program."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith("Uid:"):
                return {int(word) for word in line.split()[1:]}
    return set()


def _recorded(scratch: str) -> list[tuple[int, int]]:
    """Pid and start of the server and its helper, if they live and belong to the user who wrote them down."""
    try:
        with open(os.open(os.path.join(scratch, RECORD), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
            writer = os.fstat(file.fileno()).st_uid
            recorded = [(int(pid), int(ticks)) for pid, ticks in json.load(file)]
    except (OSError, ValueError, TypeError):
        return []
    others = [(pid, ticks) for pid, ticks in recorded if pid != os.getpid() and start_ticks(pid) == ticks]
    return [(pid, ticks) for pid, ticks in others if _users_of(pid) == {writer}]


def _marked(scratch: str) -> list[tuple[int, int]]:
    """Processes of slots without a PID namespace: their HOME or their working directory is in this scratch space.

    One that has cleared its environment and left its directory still has its mark; at `plain` it could change it.
    """
    number = str(mark(scratch))
    slots = os.path.join(os.path.realpath(scratch), "slots", "")
    try:
        allowed = {os.geteuid(), os.lstat(scratch).st_uid}
    except OSError:
        return []
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        users = _users_of(pid)
        if len(users) != 1 or not (users <= allowed or (os.geteuid() == 0 and min(users) in RUN_UIDS_ALL)):
            continue
        ticks = start_ticks(pid)
        if ticks is not None and (_has(pid, number) or _is_shell_in(pid, slots) or _works_in(pid, slots)):
            found.append((pid, ticks))
    return found


def _has(pid: int, number: str) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/limits") as file:
        return any(line.split()[2:5] == ["locks", number, number] for line in file if line.startswith("Max file locks"))
    return False


def _works_in(pid: int, slots: str) -> bool:
    with contextlib.suppress(OSError):  # it ended, or is not ours to read
        with open(f"/proc/{pid}/environ", "rb") as file:
            if f"HOME={slots}".encode() in file.read():
                return True
        return f"{os.readlink(f'/proc/{pid}/cwd')}/".startswith(slots)
    return False


def _is_shell_in(pid: int, slots: str) -> bool:
    """A shell of a slot (helper/hidden.c) shows nothing but its arguments."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        begin = start(slots).rpartition("'; ")[0]
        return f"\0-c\0{begin}".encode() in file.read()
    return False


def _end(find: Callable[[str], list[tuple[int, int]]], scratch: str) -> list[str]:
    """Kill until none is found: what is killed may have forked a moment before."""
    deadline = time.monotonic() + WAIT_S
    while True:
        alive = find(scratch)
        if not alive or time.monotonic() > deadline:
            return [f"process {pid} did not end" for pid, _ in alive]
        for pid, _ in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)


def clean(scratch: str) -> list[str]:
    """Remove leftovers; returns what could not be removed."""
    problems = _end(_recorded, scratch) + _end(_marked, scratch)
    problems += [f"cgroup {path} is still there" for path in Cgroups(scratch).remove()]
    remove_layers_dir(scratch)
    for name in ("slots", "run", "layers", "helper"):
        problems += remove_mapped(os.path.join(scratch, name))
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(scratch, RECORD))
    return problems
