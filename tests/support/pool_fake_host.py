"""A slot host that lives in the test process, for the faults a real one cannot be made to have at the right moment.

It speaks the interface of `HostClient`; every call can be made to wait, to fail, or to be lost.
"""

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.errors import HostStartFailed, SandboxError, SandboxLost, StaleLease
from sandbox_pool.providers.base import Host, HostRecord

INFO = {
    "protocol": 1,
    "server_version": "0",
    "pid": 1,
    "isolation": "namespaces",
    "isolation_reason": "a test says so",
    "missing": (),
    "rejected": (),
}


@dataclass
class FakeSlot:
    state: str = "free"
    epoch: int = 0
    task_id: str = ""
    idle_s: float | None = None


@dataclass
class FakeServer:
    """State of one server. `gates` hold calls back by name until the test opens them."""

    name: str
    slots: list[FakeSlot]
    info: dict
    gates: dict[str, asyncio.Event] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    dirty: tuple[str, ...] = ()
    scratch_free_mb: int = 10_000
    calls: list[tuple] = field(default_factory=list)
    clients: list = field(default_factory=list)
    snapshots: dict[str, bytes] = field(default_factory=dict)
    epochs: int = 0
    dead: bool = False

    async def enter(self, call, *detail):
        self.calls.append((call, *detail))
        if call in self.gates:
            await self.gates[call].wait()
        if call in self.errors:
            raise self.errors[call]
        if self.dead:
            raise SandboxLost(f"{self.name} is dead")

    def hold(self, call):
        self.gates[call] = asyncio.Event()
        return self.gates[call]

    def crash(self):
        self.dead = True
        for client in list(self.clients):
            client.lose()


class FakeClient:
    def __init__(self, server):
        self.server = server
        self.info = SimpleNamespace(**{**INFO, **server.info}, host_id=server.name, slots=len(server.slots))
        self.connection = None
        self.closed = False
        self._lost = []
        server.clients.append(self)

    def on_lost(self, callback):
        self._lost.append(callback)

    def lose(self):
        if not self.closed:
            self.closed = True
            for callback in self._lost:
                callback(SandboxLost("lost"))

    async def health(self):
        await self.server.enter("health")
        return SimpleNamespace(
            scratch_free_mb=self.server.scratch_free_mb, scratch_total_mb=20_000, slots={}, uptime_s=1.0
        )

    async def lease(self, slot, *, task_id, spec, snapshot=None):
        await self.server.enter("lease", slot, task_id, snapshot)
        found = self.server.slots[slot]
        if found.state != "free":
            raise SandboxError(f"slot {slot} is {found.state}")
        self.server.epochs += 1
        found.state, found.epoch, found.task_id = "leased", self.server.epochs, task_id
        return Sandbox(None, slot, found.epoch, task_id=task_id, spec=spec, isolation=self.info.isolation, workdir="/w")

    async def release(self, slot, epoch):
        await self.server.enter("release", slot)
        found = self.server.slots[slot]
        if found.state != "leased" or found.epoch != epoch:
            raise StaleLease(f"slot {slot} has epoch {found.epoch}")
        clean = not self.server.dirty
        found.state = "free" if clean else "quarantined"
        return SimpleNamespace(clean=clean, problems=self.server.dirty, duration_s=0.0)

    async def slots(self):
        await self.server.enter("slots")
        return [
            SimpleNamespace(slot=n, state=slot.state, epoch=slot.epoch, task_id=slot.task_id, idle_s=slot.idle_s)
            for n, slot in enumerate(self.server.slots)
        ]

    async def drop_snapshot(self, snapshot):
        del self.server.snapshots[snapshot]

    async def export_snapshot(self, snapshot):
        yield self.server.snapshots[snapshot]

    async def import_snapshot(self, chunks):
        name = f"{self.server.name}-copy-{len(self.server.snapshots)}"
        self.server.snapshots[name] = b"".join([chunk async for chunk in chunks])
        return name

    async def shutdown(self):
        self.server.calls.append(("shutdown",))

    async def close(self):
        self.closed = True
        with contextlib.suppress(ValueError):
            self.server.clients.remove(self)


class FakePlace:
    """A provider and the servers it started. Set `fail` or `ambiguous` to make the next starts go wrong."""

    def __init__(self, slots=2, owner="", shared=True, **info):
        self.slots = slots
        self.owner = owner
        self.shared = shared
        self.info = info
        self.servers: dict[str, FakeServer] = {}
        self.started: list[tuple[str, float]] = []
        self.stopped: list[str] = []
        self.failures: list[Exception] = []
        self.ambiguous = 0
        self.stop_failures = 0
        self.start_gate: asyncio.Event | None = None
        self.at_once = 0
        self.most_at_once = 0
        self.expires_at_s = None

    def host_key(self, spec):
        return "all" if self.shared else spec.key()

    async def start(self, name, spec):
        self.started.append((name, time.monotonic()))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if self.start_gate is not None:
                await self.start_gate.wait()
            if self.failures:
                raise self.failures.pop(0)
            self.servers.setdefault(name, FakeServer(name, [FakeSlot() for _ in range(self.slots)], self.info))
            if self.ambiguous:
                self.ambiguous -= 1
                raise HostStartFailed("the connection was cut after the create")
        finally:
            self.at_once -= 1
        return Host(name, f"fake:{name}", "token", identity=name, expires_at_s=self.expires_at_s)

    async def stop(self, name):
        if self.stop_failures:
            self.stop_failures -= 1
            raise ConnectionError("the place does not answer")
        self.stopped.append(name)
        self.servers.pop(name, None)

    async def list(self):
        return [HostRecord(name, self.owner, "running") for name in self.servers]

    async def connect(self, address, token):
        name = address.removeprefix("fake:")
        if name not in self.servers:
            raise SandboxLost(f"{name} does not exist")
        return FakeClient(self.servers[name])

    @property
    def server(self):
        (server,) = self.servers.values()
        return server
