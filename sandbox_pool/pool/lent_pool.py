"""One pool for several processes: the one that has it lends leases, the others use them over connections of their own.

`PoolLender` answers in the process that has the pool, `LentPool` is the pool of the others. Only the words of a lease
pass between them: commands go straight to the slot server. What a process held when it ended is taken back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from sandbox_pool.client.connection import TaskSet
from sandbox_pool.client.connection import dial as dial_plainly
from sandbox_pool.client.host_client import HostClient
from sandbox_pool.client.trees import TreeLimits
from sandbox_pool.config import PoolConfig
from sandbox_pool.errors import SandboxError
from sandbox_pool.owned_folders import make_owned_folder
from sandbox_pool.pool.host import Grant, PooledHost
from sandbox_pool.pool.lease import Lease, LeaseRequest
from sandbox_pool.pool.metrics import PoolMetrics
from sandbox_pool.pool.pool import SlotPool
from sandbox_pool.pool.snapshot_places import snapshot_name
from sandbox_pool.process_channel import Channel
from sandbox_pool.providers.base import Dials, Host
from sandbox_pool.server.isolation.levels import WORKDIR
from sandbox_pool.spec import SandboxSpec

PIECE = 1 << 18


@dataclass(frozen=True)
class LentLease:
    """What another process needs to know of a lease."""

    number: int
    host: str
    endpoint: Host
    slot: int
    epoch: int
    task_id: str
    spec: SandboxSpec
    workdir: str


class PoolLender:
    """Lends the leases of a pool to one other process; `take_back` when that has ended."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._numbers = itertools.count()
        self._leases: dict[int, Lease] = {}
        self._snapshots: dict[str, str] = {}
        """The other process's name -> the pool's."""

    async def acquire(
        self, task_id: str, spec: SandboxSpec | None, timeout_s: float | None, ttl_s: float | None, snapshot: str | None
    ) -> LentLease:
        """As `SlotPool.acquire`."""
        known = snapshot if snapshot is None else self._snapshots.get(snapshot, snapshot)
        lease = await self._pool.acquire(task_id, spec, timeout_s, ttl_s=ttl_s, snapshot=known)
        number = next(self._numbers)
        self._leases[number] = lease
        return LentLease(
            number, lease.host, lease.endpoint, lease.slot, lease.epoch, task_id, lease.spec, lease.workdir
        )

    async def release(self, number: int) -> None:
        """Reset the slot of a lease; safe to call twice."""
        if (lease := self._leases.pop(number, None)) is not None:
            await lease.release()

    async def remember_snapshot(self, number: int, snapshot: str) -> None:
        """A lease of the other process made a snapshot."""
        if (lease := self._leases.get(number)) is not None:
            name = lease.remember_snapshot(snapshot)
            self._snapshots[name] = name

    async def add_snapshot(self, name: str, path: str, spec: SandboxSpec) -> None:
        """A snapshot from a file that the other process has open."""
        file = Path(path).open("rb")  # noqa: ASYNC230, SIM115 - not in a thread: the next call may ask for it; the pool closes it
        self._snapshots[name] = self._pool.add_snapshot(file, spec)

    async def drop_snapshot(self, name: str) -> None:
        """Delete it on every host."""
        await self._pool.drop_snapshot(self._snapshots.pop(name, name))

    async def place_of(self, name: str) -> tuple[str, Host, str, SandboxSpec]:
        """Name and address of a host that has a snapshot, its id there, and its spec."""
        return self._pool.place_of(self._snapshots.get(name, name))

    async def has_snapshot(self, name: str) -> bool:
        """As `SlotPool.has_snapshot`."""
        return await self._pool.has_snapshot(self._snapshots.get(name, name))

    async def take_back(self) -> None:
        """Reset every slot, and drop every snapshot, that the other process left."""
        leases, self._leases = self._leases, {}
        snapshots, self._snapshots = self._snapshots, {}
        await asyncio.gather(*(lease.release() for lease in leases.values()), return_exceptions=True)
        for snapshot in snapshots.values():
            with contextlib.suppress(SandboxError):
                await self._pool.drop_snapshot(snapshot)


class LentPool:
    """A pool of another process, for rollouts of this one. It has what environments use of a pool."""

    def __init__(self, channel: Channel, config: PoolConfig, relay: str | None) -> None:
        """`channel` leads to a `PoolLender`; `relay` is the socket of a `HostRelay`, where hosts need one."""
        self.config = config
        self.metrics = PoolMetrics()
        self._channel = channel
        self._relay = relay
        self._hosts: dict[str, PooledHost] = {}
        self._numbers: dict[Grant, int] = {}
        self._files: dict[str, BinaryIO] = {}
        self._file_numbers = itertools.count(1)

    def lease(
        self,
        task_id: str,
        spec: SandboxSpec | None = None,
        timeout_s: float | None = None,
        *,
        ttl_s: float | None = None,
    ) -> LeaseRequest:
        """As `SlotPool.lease`."""
        return LeaseRequest(lambda: self._acquire(task_id, spec, timeout_s, ttl_s, None))

    def lease_from(
        self, snapshot: str, task_id: str, timeout_s: float | None = None, *, ttl_s: float | None = None
    ) -> LeaseRequest:
        """As `SlotPool.lease_from`."""
        return LeaseRequest(lambda: self._acquire(task_id, None, timeout_s, ttl_s, snapshot))

    async def _acquire(
        self, task_id: str, spec: SandboxSpec | None, timeout_s: float | None, ttl_s: float | None, snapshot: str | None
    ) -> Lease:
        lent: LentLease = await self._channel.call(
            "acquire", task_id, spec, timeout_s, ttl_s, snapshot, reclaim=self._reclaim
        )
        host = self._host(lent.host, lent.endpoint, lent.spec)
        grant = Grant(host, lent.slot, lent.epoch, lent.task_id, lent.spec, lent.workdir)
        try:
            client = await host.client_here()
        except BaseException:
            self._reclaim(lent)
            raise
        self._numbers[grant] = lent.number
        return Lease(self, client, grant)

    def _reclaim(self, lent: LentLease) -> None:
        self._channel.post("release", lent.number)

    def _host(self, name: str, endpoint: Host, spec: SandboxSpec) -> PooledHost:
        """A host as this process knows it: how it is reached. What happens to it is for the pool's process to judge."""
        if name not in self._hosts:
            self._hosts = {known: host for known, host in self._hosts.items() if host.connected}
            self._hosts[name] = PooledHost(name, "", spec, self._connect, state="ready", host=endpoint)
        return self._hosts[name]

    async def _connect(self, address: str, token: str) -> HostClient:
        return await HostClient.connect(address, token, dial=None if self._relay is None else self._dial)

    async def _dial(self, protocol: asyncio.Protocol, address: str) -> asyncio.Transport:
        transport = await dial_plainly(protocol, f"unix:{self._relay}")
        transport.write(f"{address}\n".encode())
        return transport

    async def release(self, grant: Grant) -> None:
        """Give a slot back; returns when it is reset. Safe to call twice."""
        if (number := self._numbers.pop(grant, None)) is not None:
            await asyncio.shield(self._channel.call("release", number))

    def remember_snapshot(self, snapshot: str, grant: Grant) -> str:
        """As `SlotPool.remember_snapshot`."""
        self._channel.post("remember_snapshot", self._numbers[grant], snapshot)
        return snapshot_name(grant.host, snapshot)

    async def has_snapshot(self, snapshot: str) -> bool:
        """As `SlotPool.has_snapshot`."""
        found: bool = await self._channel.call("has_snapshot", snapshot)
        return found

    async def download_snapshot(self, snapshot: str, local: Path, limits: TreeLimits | None = None) -> None:
        """As `SlotPool.download_snapshot`."""
        client, copy, spec = await self._reach(snapshot)
        await client.download_snapshot(copy, spec.workdir or WORKDIR, local, limits or TreeLimits())

    async def export_snapshot(self, snapshot: str) -> AsyncIterator[bytes]:
        """As `SlotPool.export_snapshot`."""
        client, copy, _ = await self._reach(snapshot)
        async for chunk in client.export_snapshot(copy):
            yield chunk

    async def _reach(self, snapshot: str) -> tuple[HostClient, str, SandboxSpec]:
        name, endpoint, copy, spec = await self._channel.call("place_of", snapshot)
        return await self._host(name, endpoint, spec).client_here(), copy, spec

    def add_snapshot(self, file: BinaryIO, spec: SandboxSpec) -> str:
        """As `SlotPool.add_snapshot`."""
        name = f"process-{os.getpid()}/file/{next(self._file_numbers)}"
        self._files[name] = file  # open until it is dropped: its name may be gone
        self._channel.post("add_snapshot", name, f"/proc/{os.getpid()}/fd/{file.fileno()}", spec)
        return name

    async def import_snapshot(self, chunks: AsyncIterable[bytes], task_id: str, spec: SandboxSpec | None = None) -> str:
        """As `SlotPool.import_snapshot`."""
        async with await self._acquire(task_id, spec, None, None, None) as lease:
            return await lease.import_snapshot(chunks)

    async def drop_snapshot(self, snapshot: str) -> None:
        """As `SlotPool.drop_snapshot`."""
        try:
            await self._channel.call("drop_snapshot", snapshot)
        finally:
            if (file := self._files.pop(snapshot, None)) is not None:
                file.close()

    async def close(self) -> None:
        """Hang up on every host."""
        for host in self._hosts.values():
            await host.close_clients()


class HostRelay:
    """Lets other processes of this user reach hosts whose provider opens connections itself. Used as `async with`."""

    def __init__(self, provider: Dials) -> None:
        self._provider = provider
        self._connections = TaskSet()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> str:
        """The path of the socket."""
        path = make_owned_folder("relay-") / "s"
        server = await asyncio.start_unix_server(self._serve, path)
        self._stack.callback(server.close)
        return str(path)

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self._connections.cancel()
        await self._connections.finish()

    def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.start(self._connect(reader, writer))

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The first line is an address; everything else is for whoever is there. Either end ends both."""
        loop = asyncio.get_running_loop()
        there = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(there)
        pumps = TaskSet()
        with contextlib.closing(writer), contextlib.suppress(OSError, TimeoutError):
            address = (await reader.readline()).decode().rstrip("\n")
            transport = await self._provider.dial(protocol, address)
            with contextlib.closing(asyncio.StreamWriter(transport, protocol, there, loop)) as far:
                both = [pumps.start(_pump(reader, far)), pumps.start(_pump(there, writer))]
                try:
                    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    pumps.cancel()
                    await pumps.finish()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while piece := await source.read(PIECE):
        sink.write(piece)
        await sink.drain()
