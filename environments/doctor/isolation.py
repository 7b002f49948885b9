"""The isolation that the local pool will get, found the way the pool finds it: by building a slot and probing it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from environments.doctor.findings import Finding

if TYPE_CHECKING:
    from sandbox_pool.client import HostInfo

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
    helper = "" if info.helper == "compiled" else f"; helper: {info.helper}"
    detail = f"{level}: {info.isolation_reason}{lacking}{helper}"
    if not info.rejected:
        return Finding("isolation", "limited" if info.missing else "ok", detail)
    better, why = info.rejected[0]
    return Finding("isolation", "limited", detail, f"for {better}: {why}")
