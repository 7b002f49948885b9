"""The client of one slot server: lease, release, snapshots, health. One connection serves any number of sandboxes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_pool.client.connection import Connection, Dial
from sandbox_pool.client.connection import dial as dial_directly
from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.client.trees import TreeLimits, unpack_layer
from sandbox_pool.server.serving import wire
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostInfo:
    """What a slot server says of itself."""

    protocol: int
    server_version: str
    host_id: str
    pid: int
    slots: int
    isolation: str
    """namespaces, landlock, uid or plain."""
    isolation_reason: str
    missing: tuple[str, ...] = ()
    """Limits that cannot be enforced there, e.g. memory."""
    rejected: tuple[tuple[str, str], ...] = ()
    """Stronger levels with the reason why each was refused."""
    variant: str = ""
    """Of `namespaces`: root, rootless or nouser."""
    image: str | None = None
    """The image that the server itself runs in: slots of specs that name it get its own root."""


@dataclass(frozen=True)
class HostHealth:
    """Scratch space and slots of a host at one moment."""

    scratch_free_mb: int
    scratch_total_mb: int
    states: dict[str, int] = field(default_factory=dict)
    """Number of slots by state."""
    uptime_s: float = 0.0


@dataclass(frozen=True)
class ResetReport:
    """Whether a slot was proven clean after a lease; one that was not is quarantined by its server."""

    clean: bool
    problems: tuple[str, ...]
    duration_s: float


@dataclass(frozen=True)
class SlotState:
    """One slot as its server sees it."""

    slot: int
    state: str
    """free, leased, resetting or quarantined"""
    epoch: int
    task_id: str
    idle_s: float | None = None
    """For how long nothing was asked of it; None while a request or a background process is under way."""


class HostClient:
    """Connection to one slot server."""

    def __init__(self, connection: Connection, info: HostInfo) -> None:
        self.connection = connection
        self.info = info

    @classmethod
    async def connect(
        cls, address: str, token: str, *, timeout_s: float = 10.0, dial: Dial | None = None
    ) -> HostClient:
        """Connect and authenticate. Raises SandboxLost when there is no answer, ProtocolError when refused.

        Who dials in a way of their own gets no lines to slots: nothing may pass beside that way.
        """
        connection = await Connection.open(address, timeout_s, dial or dial_directly)
        try:
            async with asyncio.timeout(timeout_s):
                hello = {"op": "hello", "protocol": wire.PROTOCOL, "token": token}
                header, _ = await connection.call(hello)
                if dial is None:
                    await connection.take_lines(address, token, header)
        except BaseException:
            await connection.close()
            raise
        return cls(connection, _host_info(header))

    @property
    def closed(self) -> bool:
        """Whether the connection is gone, lost or closed."""
        return self.connection.failure is not None

    async def _ask(self, op: str, **values: Any) -> dict[str, Any]:
        header, _ = await self.connection.call({"op": op, **values})
        return header

    async def health(self) -> HostHealth:
        """Scratch space and slots, now."""
        header = await self._ask("health")
        return HostHealth(header["scratch_free_mb"], header["scratch_total_mb"], header["states"], header["uptime_s"])

    async def slots(self) -> list[SlotState]:
        """Every slot of the host."""
        header = await self._ask("slots")
        return [SlotState(**slot) for slot in header["slots"]]

    async def lease(
        self,
        slot: int,
        *,
        task_id: str,
        spec: SandboxSpec,
        snapshot: str | None = None,
        image: Mapping[str, Any] | None = None,
    ) -> Sandbox:
        """Prepare a free slot for a task. Without all layers of its image the host raises LayersMissing."""
        fields = spec.model_dump(mode="json", exclude={"files"})
        header = await self._ask("lease", slot=slot, task_id=task_id, spec=fields, snapshot=snapshot, image=image)
        if header["shell_brought"]:
            log.info("the image %s has no bash that runs: commands run in the host's", spec.image)
        sandbox = self.sandbox(slot, header["epoch"], task_id=task_id, spec=spec, workdir=header["workdir"])
        if spec.files and snapshot is None:
            try:
                for path, content in spec.files.items():
                    await sandbox.write_file(path, content)
            except BaseException:
                await asyncio.shield(self.release(slot, sandbox.epoch))
                raise
        return sandbox

    def sandbox(self, slot: int, epoch: int, *, task_id: str, spec: SandboxSpec, workdir: str = "") -> Sandbox:
        """The sandbox of a lease that was taken over another connection."""
        return Sandbox(
            self.connection,
            slot,
            epoch,
            task_id=task_id,
            spec=spec,
            isolation=self.info.isolation,
            workdir=workdir or spec.workdir or "",
        )

    async def release(self, slot: int, epoch: int) -> ResetReport:
        """End a lease: the slot is killed, dropped, rebuilt and proven clean, or quarantined."""
        header = await self._ask("release", slot=slot, epoch=epoch)
        return ResetReport(header["clean"], tuple(header["problems"]), header["duration_s"])

    async def drop_snapshot(self, snapshot: str) -> None:
        """Free a snapshot; forks that run from it are not disturbed."""
        await self._ask("drop_snapshot", snapshot=snapshot)

    def export_snapshot(self, snapshot: str) -> AsyncIterator[bytes]:
        """A snapshot as bytes, to be imported on another host."""
        return self.connection.stream({"op": "export_snapshot", "snapshot": snapshot})

    async def download_snapshot(self, snapshot: str, workdir: str, local: Path, limits: TreeLimits) -> None:
        """Copy the working directory of a snapshot that holds nothing else to this machine; no slot is needed."""
        # Slots without a root of their own keep their working directory at the top of the layer.
        folder = workdir.strip("/") if self.info.isolation == "namespaces" else workdir.rstrip("/").rpartition("/")[2]
        await unpack_layer(self.export_snapshot(snapshot), folder, local, limits)

    async def import_snapshot(self, chunks: AsyncIterable[bytes]) -> str:
        """The inverse of `export_snapshot`; returns the snapshot's id on this host."""
        header, _ = await self.connection.call({"op": "import_snapshot"}, chunks=chunks)
        return str(header["snapshot"])

    async def put_layer(self, diff_id: str, digest: str | None, chunks: AsyncIterable[bytes]) -> None:
        """Have the host unpack a layer of an image, unless it has it."""
        await self.connection.call({"op": "put_layer", "diff_id": diff_id, "digest": digest}, chunks=chunks)

    async def shutdown(self) -> None:
        """Have the server clean everything and exit."""
        await self._ask("shutdown")

    async def close(self) -> None:
        """Disconnect; the server goes on until its owner's time is up."""
        await self.connection.close()

    def on_lost(self, callback: Callable[[Exception], None]) -> None:
        """Called once when the connection is lost; not after `close`."""
        self.connection.on_lost(callback)


def _host_info(header: dict[str, Any]) -> HostInfo:
    return HostInfo(
        protocol=header["protocol"],
        server_version=header["server_version"],
        host_id=header["host_id"],
        pid=header["pid"],
        slots=header["slots"],
        isolation=header["isolation"],
        isolation_reason=header["isolation_reason"],
        missing=tuple(header["missing"]),
        rejected=tuple((name, why) for name, why in header["rejected"]),
        variant=header["variant"],
        image=header["image"],
    )
