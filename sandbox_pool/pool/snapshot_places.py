"""Which hosts have which snapshot. One is copied to another host when a task must run there."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import BinaryIO

from sandbox_pool.errors import SandboxError, SandboxLost
from sandbox_pool.pool.host import PooledHost
from sandbox_pool.spec import SandboxSpec

CHUNK = 1 << 20


@dataclass(eq=False)
class _Snapshot:
    spec: SandboxSpec
    copies: dict[PooledHost, str] = field(default_factory=dict)
    """The id under which each host has it."""
    copying: dict[PooledHost, asyncio.Task[str]] = field(default_factory=dict)
    file: BinaryIO | None = None
    """Where it comes from, when no lease of this pool made it; open as long as it is needed."""


class SnapshotLocator:
    """Where one snapshot can be used, for the task that wants to start from it."""

    def __init__(self, name: str, snapshot: _Snapshot) -> None:
        self._name = name
        self._snapshot = snapshot

    def is_on(self, host: PooledHost) -> bool:
        """Whether this host has it already."""
        return host in self._snapshot.copies

    async def place(self, host: PooledHost) -> str:
        """The snapshot's id on this host; copied there first when need be, once however many ask."""
        snapshot = self._snapshot
        if host in snapshot.copies:
            return snapshot.copies[host]
        task = snapshot.copying.get(host)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._copy(host))
            snapshot.copying[host] = task
            task.add_done_callback(lambda _: snapshot.copying.pop(host, None))
        return await asyncio.shield(task)

    async def _copy(self, host: PooledHost) -> str:
        source = next((other for other in self._snapshot.copies if other.state in ("ready", "draining")), None)
        if source is not None and source.client is not None:
            chunks = source.client.export_snapshot(self._snapshot.copies[source])
        elif self._snapshot.file is not None:
            chunks = _chunks(self._snapshot.file.fileno())
        else:
            raise SandboxLost(f"the snapshot {self._name} went away with its host")
        if host.client is None:
            raise SandboxLost(f"{host.name} went away before the snapshot {self._name} came to it")
        copy = await host.client.import_snapshot(chunks)
        self._snapshot.copies[host] = copy
        host.snapshots.add(copy)
        return copy


def snapshot_name(host: PooledHost, snapshot: str) -> str:
    """What the pool calls a snapshot that a lease on this host made."""
    return f"{host.name}/{snapshot}"


async def _chunks(descriptor: int) -> AsyncIterator[bytes]:
    """By position: the same file may be read for several hosts at once."""
    position = 0
    while chunk := await asyncio.to_thread(os.pread, descriptor, CHUNK, position):
        position += len(chunk)
        yield chunk


class SnapshotStore:
    """All snapshots that leases of this pool have made."""

    def __init__(self) -> None:
        self._snapshots: dict[str, _Snapshot] = {}
        self._numbers = itertools.count(1)

    def add(self, snapshot: str, host: PooledHost, spec: SandboxSpec) -> str:
        """Record a snapshot that a lease on this host made; its name in the pool, since ids repeat between hosts.

        Safe from any thread.
        """
        name = snapshot_name(host, snapshot)
        self._snapshots[name] = _Snapshot(spec, {host: snapshot})
        host.snapshots.add(snapshot)
        return name

    def add_file(self, file: BinaryIO, spec: SandboxSpec) -> str:
        """A snapshot that was exported to a file: it is copied to hosts when a lease needs it there."""
        name = f"file/{next(self._numbers)}"
        self._snapshots[name] = _Snapshot(spec, file=file)
        return name

    def spec_of(self, name: str) -> SandboxSpec:
        """The spec of the slot it was made in; a lease that starts from it gets the same."""
        return self._find(name).spec

    def locator(self, name: str) -> SnapshotLocator:
        """For the dispatcher; raises when no living host has it."""
        snapshot = self._find(name)
        for host in [host for host in snapshot.copies if host.state == "gone"]:
            del snapshot.copies[host]
        if not snapshot.copies and snapshot.file is None:
            raise SandboxLost(f"the snapshot {name} went away with its host")
        return SnapshotLocator(name, snapshot)

    def host_of(self, name: str) -> tuple[PooledHost, str]:
        """A living host that has it, and its id there."""
        self.locator(name)
        return next(iter(self._find(name).copies.items()))

    async def drop(self, name: str) -> None:
        """Free it everywhere."""
        snapshot = self._snapshots.pop(name, None)
        if snapshot is not None and snapshot.file is not None:
            snapshot.file.close()
        for host, copy in (snapshot.copies if snapshot else {}).items():
            host.snapshots.discard(copy)
            if host.state != "gone" and host.client is not None:
                await host.client.drop_snapshot(copy)

    def _find(self, name: str) -> _Snapshot:
        if name not in self._snapshots:
            raise SandboxError(f"there is no snapshot {name!r} in this pool")
        return self._snapshots[name]
