"""What environments use of a pool. `SlotPool` provides it; tests may bring a smaller one."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.client.trees import TreeLimits
from sandbox_pool.spec import SandboxSpec

__all__ = ["Pool", "Sandbox"]


class Pool(Protocol):
    """Where sandboxes are leased."""

    def lease(
        self,
        task_id: str,
        spec: SandboxSpec | None = None,
        timeout_s: float | None = None,
        *,
        ttl_s: float | None = None,
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh slot for this task."""

    def lease_from(
        self, snapshot: str, task_id: str, timeout_s: float | None = None, *, ttl_s: float | None = None
    ) -> AbstractAsyncContextManager[Sandbox]:
        """A slot that starts with the files of a snapshot."""

    async def has_snapshot(self, snapshot: str) -> bool:
        """Whether a slot can still start from it: snapshots go with the hosts that have them."""

    async def download_snapshot(self, snapshot: str, local: Path, limits: TreeLimits | None = None) -> None:
        """Copy the working directory out of a snapshot that was taken of it alone."""

    def export_snapshot(self, snapshot: str) -> AsyncIterator[bytes]:
        """A snapshot as bytes."""

    def add_snapshot(self, file: BinaryIO, spec: SandboxSpec) -> str:
        """A snapshot from a file of such bytes."""

    async def import_snapshot(self, chunks: AsyncIterable[bytes], task_id: str, spec: SandboxSpec) -> str:
        """The inverse of `export_snapshot`, for slots of this spec."""

    async def drop_snapshot(self, snapshot: str) -> None:
        """Free a snapshot."""
