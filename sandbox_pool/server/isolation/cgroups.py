"""Limits by cgroup, version 1 or 2. What cannot be limited here is reported as missing, never silently skipped."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Mapping
from typing import Any

ROOT = "/sys/fs/cgroup"
PERIOD_US = 100_000
LIMITS = ("memory", "pids", "cpu")
REPORTS = {"memory": ("memory.oom_control", "memory.events"), "pids": ("pids.current",), "cpu": ("cpu.stat",)}
"""What a kernel that enforces a limit reports on it. Groups of gVisor take any limit of memory or cpu and keep none."""


def _write(path: str, text: str) -> bool:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:
        return False
    return True


def _mounted(kind: str) -> dict[str, str]:
    """Mount points of cgroup hierarchies: controllers -> path for v1, "" -> path for v2."""
    found: dict[str, str] = {}
    try:
        with open("/proc/self/mounts") as table:
            lines = [line.split() for line in table]
    except OSError:
        return found
    for fields in lines:
        if fields[2] == kind:
            if kind == "cgroup2":
                found.setdefault("", fields[1])
            for option in fields[3].split(","):
                found.setdefault(option, fields[1])
    return found


def _enforced(base: str, controller: str) -> bool:
    return any(os.path.exists(os.path.join(base, name)) for name in REPORTS[controller])


class Cgroups:
    """One group per slot below one group per server, named after its scratch directory so that it is found again."""

    def __init__(self, scratch: str) -> None:
        self.name = "hermes_" + hashlib.sha1(os.path.realpath(scratch).encode()).hexdigest()[:12]
        self._bases: dict[str, str] = {}
        self._version = 0

    def setup(self) -> None:
        """Find out which controllers can be used, by making groups in them."""
        v1 = _mounted("cgroup")
        for controller in LIMITS:
            if controller in v1:
                base = os.path.join(v1[controller], self.name)
                with contextlib.suppress(OSError):
                    os.makedirs(base, exist_ok=True)
                    if _enforced(base, controller):
                        self._bases[controller] = base
                    else:
                        os.rmdir(base)
        self._version = 1 if self._bases else 0
        if not self._bases:
            self._setup_v2(_mounted("cgroup2").get(""))

    def _setup_v2(self, mount: str | None) -> None:
        if mount is None:
            return
        base = os.path.join(mount, self.name)
        try:
            os.makedirs(base, exist_ok=True)
        except OSError:
            return
        for controller in LIMITS:
            _write(os.path.join(mount, "cgroup.subtree_control"), f"+{controller}")
            switched_on = _write(os.path.join(base, "cgroup.subtree_control"), f"+{controller}")
            if switched_on and _enforced(base, controller):
                self._bases[controller] = base
        self._version = 2

    @property
    def missing(self) -> tuple[str, ...]:
        """Limits that no cgroup here can enforce."""
        return tuple(limit for limit in LIMITS if limit not in self._bases)

    def _values(self, spec: Mapping[str, Any]) -> list[tuple[str, str, str]]:
        """(controller, file, value) for every limit of the spec; a limit that is not asked for is lifted."""
        memory, pids, cpu = spec.get("memory_mb"), spec.get("pids"), spec.get("cpu")
        # Keeper and init of the slot count as well; the limit is what commands may have.
        allowed = str(pids + 8) if pids else "max"
        if self._version == 1:
            return [
                ("memory", "memory.limit_in_bytes", str(memory << 20) if memory else "-1"),
                ("pids", "pids.max", allowed),
                ("cpu", "cpu.cfs_quota_us", str(int(cpu * PERIOD_US)) if cpu else "-1"),
            ]
        return [
            ("memory", "memory.max", str(memory << 20) if memory else "max"),
            ("memory", "memory.swap.max", "0"),
            ("pids", "pids.max", allowed),
            ("cpu", "cpu.max", f"{int(cpu * PERIOD_US)} {PERIOD_US}" if cpu else f"max {PERIOD_US}"),
        ]

    def prepare(self, slot: int, spec: Mapping[str, Any]) -> list[str]:
        """Set a slot's limits; returns the files through which its init joins."""
        joins: list[str] = []
        for controller, file, value in self._values(spec):
            if controller not in self._bases or (controller == "cpu" and not spec.get("cpu")):
                continue
            group = os.path.join(self._bases[controller], str(slot))
            os.makedirs(group, exist_ok=True)
            _write(os.path.join(group, file), value)
            join = os.path.join(group, "cgroup.procs")
            if join not in joins:
                joins.append(join)
        return joins

    def memory_kills(self, slot: int) -> int:
        """How many processes of a slot the kernel has killed because its memory was full."""
        base = self._bases.get("memory")
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        with contextlib.suppress(OSError, ValueError), open(os.path.join(base or "", str(slot), name)) as file:
            return sum(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
        return 0

    def processes(self, slot: int) -> list[int]:
        """Processes still in a slot's groups."""
        found: list[int] = []
        for base in dict.fromkeys(self._bases.values()):
            with contextlib.suppress(OSError), open(os.path.join(base, str(slot), "cgroup.procs")) as file:
                found += [int(line) for line in file]
        return found

    def remove(self) -> list[str]:
        """Kill what is left in the groups and remove them; returns what could not be removed."""
        bases = [
            os.path.join(path, self.name) for path in {*_mounted("cgroup").values(), *_mounted("cgroup2").values()}
        ]
        return [base for base in bases if os.path.isdir(base) and not _remove_group(base)]


def _remove_group(path: str) -> bool:
    for attempt in range(50):
        groups = [root for root, _, _ in os.walk(path, topdown=False)]
        for group in groups:
            with contextlib.suppress(OSError), open(os.path.join(group, "cgroup.procs")) as file:
                for pid in [int(line) for line in file]:
                    if pid > 1:  # 0 stands for a process this PID namespace cannot name
                        with contextlib.suppress(OSError):
                            os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                os.rmdir(group)
        if not os.path.isdir(path):
            return True
        time.sleep(0.002 * (attempt + 1))
    return False
