"""What environments use of a sandbox and of a pool. `sandbox_pool` provides both; tests may bring smaller ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from sandbox_pool.results import ExecResult, FileStat
from sandbox_pool.spec import SandboxSpec


class Sandbox(Protocol):
    """One leased slot."""

    workdir: str
    """Where commands start, as they see it."""

    async def exec(self, command: str, *, timeout_s: float | None = None) -> ExecResult:
        """Run a bash command; state persists between calls."""

    async def read_file(self, path: str) -> bytes:
        """Whole content; SandboxFileError when it cannot be read."""

    async def write_file(self, path: str, data: bytes) -> None:
        """Create or replace, with parent directories."""

    async def stat(self, path: str) -> FileStat | None:
        """What is there, symlinks not followed; None when nothing is."""

    async def list_dir(self, path: str) -> Sequence[tuple[str, FileStat]]:
        """Entries of a directory by name."""

    async def upload(self, local: Path, remote: str) -> None:
        """Copy a file or a tree into the slot."""

    async def download(self, remote: str, local: Path) -> None:
        """Copy a file or a tree out of the slot."""

    async def snapshot(self) -> str:
        """Keep the slot's files under a name that `lease_from` takes."""

    async def stop_processes(self) -> int:
        """Kill everything that runs in the slot and keep its files."""


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

    async def drop_snapshot(self, snapshot: str) -> None:
        """Free a snapshot."""
