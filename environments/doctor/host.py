"""The machine itself: interpreter, compiler, cgroups."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path

from environments.doctor.findings import Finding

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids", "cpu")


async def python() -> Finding:
    """The interpreter is one of the supported ones."""
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "ok", f"{version} at {sys.executable}")
    return Finding("python", "broken", f"{version} is not supported", "use Python 3.11, 3.12 or 3.13")


async def compiler() -> Finding:
    """A C compiler builds the slot server's helper."""
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return Finding("compiler", "ok", path)
    return Finding(
        "compiler", "limited", "no C compiler: slots are made from Python, slower", "apt-get install gcc libc6-dev"
    )


async def cgroups() -> Finding:
    """Memory, process and CPU limits of slots need a cgroup hierarchy we may write to."""
    if (_CGROUP_ROOT / "cgroup.controllers").is_file():
        present = set((_CGROUP_ROOT / "cgroup.controllers").read_text().split())
        return _cgroup_finding("v2", _CGROUP_ROOT, present)
    mounted = {name for name in _CONTROLLERS if (_CGROUP_ROOT / name).is_dir()}
    if mounted:
        return _cgroup_finding("v1", _CGROUP_ROOT / sorted(mounted)[0], mounted)
    return Finding("cgroups", "limited", "none mounted: slots are limited by rlimits and tmpfs sizes only")


def _cgroup_finding(version: str, folder: Path, present: set[str]) -> Finding:
    lacking = [name for name in _CONTROLLERS if name not in present]
    if not os.access(folder, os.W_OK):
        return Finding(
            "cgroups",
            "limited",
            f"{version}, not writable for this user: limits by rlimits",
            "run as root, or delegate a cgroup",
        )
    if lacking:
        return Finding("cgroups", "limited", f"{version}, without {', '.join(lacking)}")
    return Finding("cgroups", "ok", f"{version} with {', '.join(_CONTROLLERS)}")
