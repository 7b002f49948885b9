"""Leases on isolated slots: exec, files, processes, reset.

async with SlotPool.from_config(PoolConfig(provider="local", slots_per_host=8)) as pool:
    async with pool.lease("task-1", SandboxSpec(network="none")) as sandbox:
        result = await sandbox.exec("make test", timeout_s=60)

`SlotPool.sync(config)` is the same pool for plain threads (`sandbox_pool.pool.sync`). `PoolConfig.from_env()` reads the
TERMINAL_* variables of hermes-agent (`sandbox_pool.terminal_env`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sandbox_pool.errors import (
    AcquireTimeout,
    HostStartFailed,
    IsolationUnavailable,
    PoolClosed,
    ProtocolError,
    SandboxDestroyed,
    SandboxError,
    SandboxFileError,
    SandboxLost,
    ScratchFull,
    StaleLease,
    StateError,
)
from sandbox_pool.results import ExecResult, FileStat, LogChunk, Truncation

if TYPE_CHECKING:
    from sandbox_pool.client.sandbox import Sandbox
    from sandbox_pool.config import PoolConfig
    from sandbox_pool.pool.lease import Lease
    from sandbox_pool.pool.pool import SlotPool
    from sandbox_pool.spec import Mount, NetworkRules, SandboxSpec

_LAZY = {
    "Lease": "sandbox_pool.pool.lease",
    "Mount": "sandbox_pool.spec",
    "NetworkRules": "sandbox_pool.spec",
    "PoolConfig": "sandbox_pool.config",
    "Sandbox": "sandbox_pool.client.sandbox",
    "SandboxSpec": "sandbox_pool.spec",
    "SlotPool": "sandbox_pool.pool.pool",
}
"""Imported on first use: pydantic alone takes longer than most commands a user types."""

__all__ = [
    "AcquireTimeout",
    "ExecResult",
    "FileStat",
    "HostStartFailed",
    "IsolationUnavailable",
    "Lease",
    "LogChunk",
    "Mount",
    "NetworkRules",
    "PoolClosed",
    "PoolConfig",
    "ProtocolError",
    "Sandbox",
    "SandboxDestroyed",
    "SandboxError",
    "SandboxFileError",
    "SandboxLost",
    "SandboxSpec",
    "ScratchFull",
    "SlotPool",
    "StaleLease",
    "StateError",
    "Truncation",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
