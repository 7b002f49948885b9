"""Who owns a host: this process, told apart from every other process that ever had its pid.

A process is named by its pid and start time within one boot and one pid namespace. Whether such an owner still runs
is known exactly on its own machine and in its own pid namespace; elsewhere only by its heartbeat. Where there is no
/proc (a Mac), `ps` tells the start time, as seconds since 1970: that needs no boot.
"""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc/self/stat")
CLOCK_MAY_MOVE_S = 2


@dataclass(frozen=True)
class Owner:
    """One process of one boot of one machine."""

    machine: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_ticks: int

    def tag(self) -> str:
        """Short text form, safe in labels of every provider; `parse` reads it back."""
        return f"{self.machine}_{self.boot_id}_{self.pid_namespace}_{self.pid}_{self.start_ticks}"

    @classmethod
    def parse(cls, tag: str) -> Owner:
        """The owner that wrote this tag."""
        parts = tag.split("_")
        if len(parts) != 5 or not (parts[3].isdigit() and parts[4].isdigit()):
            raise ValueError(f"not an owner tag: {tag!r}")
        return cls(parts[0], parts[1], parts[2], int(parts[3]), int(parts[4]))


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None when there is no such process (or it is a zombie)."""
    if not _PROC.exists():
        return _start_told_by_ps(pid)
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name may hold spaces and parentheses: everything after the last one is plain numbers.
    fields = text[text.rfind(")") + 2 :].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _start_told_by_ps(pid: int) -> int | None:
    command = ["ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)]
    told = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"})
    state, _, started = told.stdout.strip().partition(" ")
    if not started or state[0] in "ZX":
        return None
    return int(time.mktime(time.strptime(" ".join(started.split()), "%a %b %d %H:%M:%S %Y")))


def _same_start(one: int | None, other: int) -> bool:
    """`ps` computes with the clock, which is set right now and then."""
    return one is not None and abs(one - other) <= (0 if _PROC.exists() else CLOCK_MAY_MOVE_S)


@functools.cache
def _place() -> tuple[str, str, str]:
    machine = ""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        if Path(path).is_file():
            machine = Path(path).read_text().strip()[:12]
            break
    # Images share machine ids between containers, so the host name belongs to it.
    name = f"{machine}.{socket.gethostname()}".replace("_", "-")
    if not _PROC.exists():
        return name, "0", "0"
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")[:12]
    namespace = Path("/proc/self/ns/pid").readlink().name.removeprefix("pid:[").rstrip("]")
    return name, boot_id, namespace


def this_process() -> Owner:
    """The calling process as an owner. Asked anew each time, so it is right after a fork."""
    machine, boot_id, namespace = _place()
    pid = os.getpid()
    ticks = start_ticks(pid)
    if ticks is None:
        raise RuntimeError("neither /proc nor ps shows this process: owners cannot be told apart")
    return Owner(machine, boot_id, namespace, pid, ticks)


def is_alive(owner: Owner, *, heartbeat_age_s: float | None, heartbeat_limit_s: float = 120.0) -> bool:
    """Whether the owner still runs: exact where its pid can be seen, else by its last heartbeat.

    An owner that cannot be seen and has no heartbeat counts as alive, so that nothing of it is removed by mistake.
    """
    here = this_process()
    if owner.machine == here.machine:
        if owner.boot_id != here.boot_id:
            return False
        if owner.pid_namespace == here.pid_namespace:
            return _same_start(start_ticks(owner.pid), owner.start_ticks)
    return heartbeat_age_s is None or heartbeat_age_s < heartbeat_limit_s
