"""What a pool is doing, as plain data and as sentences."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sandbox_pool.pool.dispatch import Dispatcher
    from sandbox_pool.pool.fleet import Fleet
    from sandbox_pool.pool.host import PooledHost
    from sandbox_pool.pool.lease import Waiter, WaitQueue
    from sandbox_pool.pool.metrics import PoolMetrics

SHOWN_HOLDERS = 5


@dataclass(frozen=True)
class HostStatus:
    """One host and its slots by state."""

    name: str
    key: str
    state: str
    isolation: str
    missing: tuple[str, ...]
    """Limits this host cannot enforce."""
    free: int
    leased: dict[int, str]
    """slot -> task"""
    resetting: int
    quarantined: dict[int, str]
    unhealthy: str
    scratch_free_mb: int | None


@dataclass(frozen=True)
class PoolStatus:
    """A pool at one moment."""

    hosts: tuple[HostStatus, ...]
    waiting: int
    leaked: dict[str, str]
    """Hosts whose provider could not confirm that they are gone; `hermes-rl pool gc` tries again."""
    metrics: dict[str, Any]

    @property
    def isolation(self) -> str:
        """The weakest isolation of any host, empty when there is no host yet."""
        from sandbox_pool.config import rank

        return max((host.isolation for host in self.hosts if host.isolation), key=rank, default="")

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {**asdict(self), "isolation": self.isolation}


def status_of(fleet: Fleet, dispatcher: Dispatcher, metrics: PoolMetrics) -> PoolStatus:
    """The pool right now."""
    hosts = tuple(_host_status(host) for host in list(fleet.hosts.values()))
    return PoolStatus(hosts, sum(1 for _ in dispatcher.queue.waiting()), dict(fleet.leaked), metrics.summary())


def _host_status(host: PooledHost) -> HostStatus:
    info = host.client.info if host.client else None
    return HostStatus(
        name=host.name,
        key=host.key,
        state=host.state,
        isolation=info.isolation if info else "",
        missing=tuple(info.missing) if info else (),
        free=len(host.free),
        leased={slot: grant.task_id for slot, grant in sorted(host.grants.items())},
        resetting=len(host.resetting),
        quarantined=dict(host.quarantined),
        unhealthy=host.unhealthy,
        scratch_free_mb=host.health.scratch_free_mb if host.health else None,
    )


def describe_wait(waiter: Waiter, fleet: Fleet, queue: WaitQueue) -> str:
    """Why this waiter got nothing: who holds the slots, what is starting, what failed."""
    now_s = time.monotonic()
    hosts = [host for host in fleet.hosts.values() if host.key == waiter.key]
    parts = [f"{waiter.task_id} got no slot in {now_s - waiter.since_s:.1f} s", *_holders(hosts, now_s)]
    starting = [host for host in hosts if host.state == "starting"]
    if starting:
        parts.append(f"{len(starting)} host(s) starting for {now_s - min(host.since_s for host in starting):.0f} s")
    parts += [f"{host.name} gives no new leases: {host.unhealthy}" for host in hosts if host.unhealthy]
    parts += [f"{host.name} is being replaced" for host in hosts if host.state == "draining"]
    if not hosts and fleet.hosts:
        parts.append(f"all {len(fleet.hosts)} hosts serve other specs")
    error = fleet.failures.last.get(waiter.key)
    if error is not None:
        parts.append(f"the last host start failed: {error}")
    others = queue.count(waiter.key) - 1
    if others > 0:
        parts.append(f"{others} other(s) in line")
    return "; ".join(parts)


def _holders(hosts: list[PooledHost], now_s: float) -> list[str]:
    grants = sorted((grant for host in hosts for grant in host.grants.values()), key=lambda grant: grant.since_s)
    if not grants:
        return []
    total = sum(len(host.free) + len(host.taken) + len(host.grants) + len(host.resetting) for host in hosts)
    shown = ", ".join(f"{grant.task_id} for {now_s - grant.since_s:.0f} s" for grant in grants[:SHOWN_HOLDERS])
    more = f" and {len(grants) - SHOWN_HOLDERS} more" if len(grants) > SHOWN_HOLDERS else ""
    return [f"{len(grants)} of {total} slots are leased ({shown}{more})"]
