"""The machine itself: interpreter, compiler, cgroups."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from environments.apps.doctor.findings import Finding

if TYPE_CHECKING:
    from sandbox_pool.client.host_client import HostInfo

START_WITHIN_S = 30.0


async def isolation() -> Finding:
    """Lease one slot of a private pool and report the level it was built at, and why not a stronger one."""
    from sandbox_pool import PoolConfig, SandboxError, SlotPool

    with tempfile.TemporaryDirectory(prefix="hermes-rl-doctor-") as state:
        config = PoolConfig(slots_per_host=1, max_hosts=1, state_dir=Path(state), start_timeout_s=START_WITHIN_S)
        try:
            async with SlotPool.from_config(config) as pool, pool.lease("doctor") as slot:
                return _finding(slot.host_info)
        except SandboxError as error:
            return Finding("isolation", "broken", f"no slot could be built: {error}", "see `hermes-rl pool status`")


def _finding(info: HostInfo) -> Finding:
    level = f"{info.isolation} ({info.variant})" if info.variant else info.isolation
    lacking = f"; cannot limit {', '.join(info.missing)}" if info.missing else ""
    detail = f"{level}: {info.isolation_reason}{lacking}"
    if not info.rejected:
        return Finding("isolation", "limited" if info.missing else "ok", detail)
    better, why = info.rejected[0]
    return Finding("isolation", "limited", detail, f"for {better}: {why}")


_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = ("memory", "pids", "cpu")


async def python() -> Finding:
    """The interpreter is one of the supported ones."""
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Finding("python", "ok", f"{version} at {sys.executable}")
    return Finding("python", "broken", f"{version} is not supported", "use Python 3.11, 3.12 or 3.13")


async def compiler() -> Finding:
    """Where no wheel brought the slot server's helper, a C compiler has to build it."""
    from sandbox_pool.server.build.helper_build import WHAT_TO_INSTALL, compilers, find_helper

    machine = platform.machine()
    if helper := find_helper(machine):
        return Finding("compiler", "ok", f"not needed: the slot helper is there, {helper}")
    if commands := compilers(machine):
        return Finding("compiler", "ok", shlex.join(commands[0]))
    return Finding(
        "compiler",
        "broken",
        f"none, and it has to build the slot helper for {machine}",
        WHAT_TO_INSTALL,
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
