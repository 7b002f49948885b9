"""The pool's state of one host: which slots are free, who holds the others, and whether it may serve more.

    free -> leased -> resetting -> free
                          \\-> quarantined -> host replaced

Every slot is in exactly one of these sets at any time; all changes happen in the pool's own loop. Health is separate:
it only decides whether new leases are given, never what happens to those that are held.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sandbox_pool.client.host_client import HostClient, HostHealth
from sandbox_pool.config import PoolConfig
from sandbox_pool.errors import SandboxLost
from sandbox_pool.providers.base import Dials, Host, Provider
from sandbox_pool.spec import SandboxSpec

REBUILDING = 2
"""Slots given back lately that a lease leaves alone while there are others."""


@dataclass(frozen=True)
class HostView:
    """What scaling needs to know of a host that counts against `max_hosts`."""

    name: str
    key: str
    starting: bool
    free: int
    idle_for_s: float | None
    """Seconds since the last lease ended; None while it is starting, leased, resetting or holds a snapshot."""


@dataclass(frozen=True)
class Plan:
    """What to do now. Starts are keys, one per host."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


def plan(
    hosts: Sequence[HostView],
    waiting: Mapping[str, int],
    config: PoolConfig,
    *,
    default_key: str,
    blocked: frozenset[str] = frozenset(),
) -> Plan:
    """What to start and stop.

    `waiting` is in order of the oldest waiter; `blocked` keys failed lately and must not be started yet.
    """
    starting = sum(host.starting for host in hosts)
    wanted = [key for key in _wanted(hosts, waiting, config, default_key) if key not in blocked]
    room = min(config.max_hosts - len(hosts), config.max_starting - starting)
    start = wanted[: max(0, room)]
    stop = _too_idle(hosts, waiting, config)
    unserved = [key for key in wanted[len(start) :] if key in waiting and not any(host.key == key for host in hosts)]
    if unserved and len(hosts) + len(start) >= config.max_hosts:
        stop += _evictable(hosts, waiting, set(unserved), stop)[: len(unserved)]
    return Plan(tuple(start), tuple(stop))


def _wanted(hosts: Sequence[HostView], waiting: Mapping[str, int], config: PoolConfig, default_key: str) -> list[str]:
    """Keys to start hosts for, in order, regardless of caps."""
    wanted: list[str] = []
    for key, count in waiting.items():
        coming = sum(config.slots_per_host if host.starting else host.free for host in hosts if host.key == key)
        missing = max(0, count - coming)
        wanted += [key] * -(-missing // config.slots_per_host)
    spare = config.min_hosts - len(hosts) - len(wanted)
    return wanted + [default_key] * max(0, spare)


def _too_idle(hosts: Sequence[HostView], waiting: Mapping[str, int], config: PoolConfig) -> list[str]:
    idle = [host for host in hosts if host.idle_for_s is not None and host.idle_for_s >= config.idle_s]
    idle = [host for host in idle if not waiting.get(host.key)]
    idle.sort(key=lambda host: -(host.idle_for_s or 0.0))
    return [host.name for host in idle[: max(0, len(hosts) - config.min_hosts)]]


def _evictable(hosts: Sequence[HostView], waiting: Mapping[str, int], keys: set[str], gone: list[str]) -> list[str]:
    idle = [host for host in hosts if host.idle_for_s is not None and host.key not in keys and host.name not in gone]
    idle = [host for host in idle if not waiting.get(host.key)]
    return [host.name for host in sorted(idle, key=lambda host: -(host.idle_for_s or 0.0))]


Connect = Callable[[str, str], Awaitable[HostClient]]
"""Reach a slot server: address, token -> connection."""


def connect_through(provider: Provider) -> Connect:
    """How the slot servers of this provider are reached."""
    return functools.partial(HostClient.connect, dial=provider.dial if isinstance(provider, Dials) else None)


@dataclass(frozen=True, eq=False)
class Grant:
    """A slot that a task holds: enough to reach it from any loop and to give it back."""

    host: PooledHost
    slot: int
    epoch: int
    task_id: str
    spec: SandboxSpec
    workdir: str
    """Where commands start, as they see it."""
    since_s: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class PooledHost:
    """State of one host. `state` is starting, ready, draining (keeps its leases, gets no more) or gone."""

    name: str
    key: str
    spec: SandboxSpec
    connect: Connect
    adopted: bool = False
    """Found running, left by a dead pool, instead of being created."""
    state: str = "starting"
    host: Host | None = None
    client: HostClient | None = None
    free: list[int] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    """Given to a waiter, not leased at the server yet."""
    grants: dict[int, Grant] = field(default_factory=dict)
    resetting: set[int] = field(default_factory=set)
    quarantined: dict[int, str] = field(default_factory=dict)
    served: set[int] = field(default_factory=set)
    snapshots: set[str] = field(default_factory=set)
    health: HostHealth | None = None
    health_failures: int = 0
    unhealthy: str = ""
    """Why no new lease is given although the host is up; empty when all is well."""
    scratch_full: bool = False
    scratch_warned_mb: int | None = None
    """What was left when the last warning was logged; None while there is enough."""
    since_s: float = field(default_factory=time.monotonic)
    idle_since_s: float = field(default_factory=time.monotonic)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _clients: dict[asyncio.AbstractEventLoop, HostClient] = field(default_factory=dict)

    @property
    def serves(self) -> bool:
        """Whether new leases may be given."""
        return self.state == "ready" and not self.unhealthy

    @property
    def busy(self) -> bool:
        """Whether any slot is held or about to be held."""
        return bool(self.taken or self.grants or self.resetting)

    def take(self) -> int:
        """Reserve a free slot: one used lately, whose pages are warm, but not the last, which is being rebuilt."""
        slot = self.free.pop(max(0, len(self.free) - REBUILDING - 1))
        self.taken.add(slot)
        return slot

    def put_back(self, slot: int) -> None:
        """A reserved slot was not used, or a reset slot is proven clean."""
        self.taken.discard(slot)
        self.resetting.discard(slot)
        if self.state != "gone":
            self.free.append(slot)
        self._touch()

    def leased(self, grant: Grant) -> bool:
        """A reserved slot is leased now; True when it had been leased before."""
        self.taken.discard(grant.slot)
        self.grants[grant.slot] = grant
        reused = grant.slot in self.served
        self.served.add(grant.slot)
        return reused

    def give_up(self, grant: Grant) -> bool:
        """The lease is over and the slot must be reset; False when it was over already."""
        if self.grants.get(grant.slot) is not grant:
            return False
        del self.grants[grant.slot]
        self.resetting.add(grant.slot)
        return True

    def quarantine(self, slot: int, reason: str) -> None:
        """The slot could not be proven clean: never leased again, and the host with it."""
        self.taken.discard(slot)
        self.resetting.discard(slot)
        self.quarantined[slot] = reason
        if self.state == "ready":
            self.state = "draining"
        self._touch()

    def _touch(self) -> None:
        if not self.busy:
            self.idle_since_s = time.monotonic()

    def view(self) -> HostView:
        """For scaling."""
        resting = self.state == "ready" and not self.busy and not self.snapshots
        idle = time.monotonic() - self.idle_since_s if resting else None
        return HostView(self.name, self.key, self.state == "starting", len(self.free) if self.serves else 0, idle)

    async def client_here(self) -> HostClient:
        """A connection that belongs to the running loop; loops other than the pool's own get theirs on first use."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            if self.host is None or self.state == "gone":
                raise SandboxLost(f"the host {self.name} is gone")
            client = await self.connect(self.host.address, self.host.token)
            raced = self._clients.get(loop)
            if raced is not None:
                await client.close()
                return raced
            self._clients[loop] = client
            for ended in [each for each in list(self._clients) if each.is_closed()]:
                self._drop_client(ended)
            client.on_lost(lambda _: self._drop_client(loop))
        return client

    def _drop_client(self, loop: asyncio.AbstractEventLoop) -> None:
        self._clients.pop(loop, None)

    def adopt_client(self, client: HostClient) -> None:
        """The connection of the pool's own loop."""
        self.client = client
        self._clients[asyncio.get_running_loop()] = client

    @property
    def connected(self) -> bool:
        """Whether any loop has a connection to it."""
        return bool(self._clients)

    def client_is_dead(self) -> bool:
        """Whether the pool's own connection is gone, so that the host cannot be reached any more."""
        return self.client is None or self.client.closed

    async def close_clients(self) -> None:
        """Close every connection, each in the loop it belongs to."""
        here = asyncio.get_running_loop()
        clients, self._clients = self._clients, {}
        for loop, client in clients.items():
            if loop is here:
                await client.close()
            elif loop.is_running():
                asyncio.run_coroutine_threadsafe(client.close(), loop)
