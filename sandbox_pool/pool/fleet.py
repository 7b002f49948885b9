"""Starts, watches, replaces and stops the hosts of a pool. Runs in the pool's own loop.

The journal brackets every host: intent before the provider is asked, forgotten only after the provider confirmed that
it is gone.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any, Protocol

from sandbox_pool.client.connection import TaskSet
from sandbox_pool.config import PoolConfig, check_isolation
from sandbox_pool.errors import HostStartFailed, IsolationUnavailable, PlaceUnreachable, SandboxError, StateError
from sandbox_pool.journal.journal import Journal, JournalHost
from sandbox_pool.journal.owner import Owner
from sandbox_pool.pool.health import HealthWatch
from sandbox_pool.pool.host import Connect, Grant, PooledHost
from sandbox_pool.pool.metrics import PoolMetrics
from sandbox_pool.providers.base import Provider, ReportsLoss, create_interval_s
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from sandbox_pool.client.host_client import HostClient

BACKOFF_S = (0.5, 2.0, 8.0, 30.0)
"""Wait after so many failed starts of one key in a row."""


class StartFailures:
    """Failed starts per key: how many in a row, why, and when to try again."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._retry_at_s: dict[str, float] = {}
        self.last: dict[str, Exception] = {}

    def add(self, key: str, error: Exception) -> int:
        """Count one; how many there are in a row now."""
        count = self._counts[key] = self._counts.get(key, 0) + 1
        self._retry_at_s[key] = time.monotonic() + BACKOFF_S[min(count, len(BACKOFF_S)) - 1]
        self.last[key] = error
        return count

    def clear(self, key: str) -> None:
        """A host of this key started, or those who waited for it were told."""
        for table in (self._counts, self._retry_at_s):
            table.pop(key, None)

    def blocked(self) -> frozenset[str]:
        """Keys that must not be tried yet."""
        now = time.monotonic()
        return frozenset(key for key, at in self._retry_at_s.items() if at > now)


log = logging.getLogger(__name__)

STOP_TIMEOUT_S = 60.0
SHUTDOWN_TIMEOUT_S = 5.0
STOP_BACKOFF_S = 0.5, 2.0, 0.0
"""Wait after each failed attempt."""


class FleetEvents(Protocol):
    """What the fleet tells the pool."""

    def fleet_changed(self) -> None:
        """A host came up, went, or may serve again: slots can be given out, or more hosts are needed."""

    def start_failed(self, key: str, error: Exception, *, final: bool) -> None:
        """A host could not be started; `final` when those who wait for it should be told."""

    def grants_lost(self, grants: list[Grant]) -> None:
        """These leases went away with their host."""


class Fleet:
    """All hosts of one pool, whatever their state."""

    def __init__(
        self,
        config: PoolConfig,
        provider: Provider,
        settings: dict[str, Any],
        journal: Journal,
        owner: Owner,
        metrics: PoolMetrics,
        events: FleetEvents,
        connect: Connect,
    ) -> None:
        self.hosts: dict[str, PooledHost] = {}
        self.failures = StartFailures()
        self.leaked: dict[str, str] = {}
        """Hosts whose provider could not confirm the stop; still in the journal, for `gc`."""
        self._config = config
        self._provider = provider
        self._settings = settings
        self._journal = journal
        self._owner = owner
        self._metrics = metrics
        self._events = events
        self._connect = connect
        self._health = HealthWatch(config, on_change=events.fleet_changed, on_lost=self.lose)
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskSet()
        if isinstance(provider, ReportsLoss):
            provider.on_host_lost(self._lost_by_name)

    def _lost_by_name(self, name: str, reason: str) -> None:
        host = self.hosts.get(name)
        if host is not None:
            self.lose(host, reason)

    def counted(self) -> list[PooledHost]:
        """Hosts that count against `max_hosts`: all but those that are draining."""
        return [host for host in self.hosts.values() if host.state in ("starting", "ready")]

    def grow(self, key: str, spec: SandboxSpec) -> None:
        """Start one more host."""
        name = f"hrl-{self._config.provider.rpartition(':')[2].lower()[:20]}-{key[:12]}-{secrets.token_hex(5)}"
        self._begin(PooledHost(name, key, spec, self._connect))

    def adopt(self, name: str, key: str, spec: SandboxSpec) -> None:
        """Use a host that a dead pool left running; the journal already names us as its owner."""
        self._metrics.bump("hosts_adopted")
        self._begin(PooledHost(name, key, spec, self._connect, adopted=True))

    def _begin(self, host: PooledHost) -> None:
        self.hosts[host.name] = host
        task = self._tasks.start(self._bring_up(host))
        self._starts[host.name] = task
        task.add_done_callback(lambda _: self._starts.pop(host.name, None))

    def retire(self, host: PooledHost, reason: str) -> None:
        """Stop an unused host."""
        self._dismiss(host, reason)
        self._metrics.bump("hosts_stopped")

    def lose(self, host: PooledHost, reason: str) -> None:
        """The host is gone or must be treated as gone: its leases are lost, and what is left of it is destroyed."""
        if host.state == "gone":
            return
        log.warning("host %s lost: %s", host.name, reason)
        grants = list(host.grants.values())
        self._metrics.bump("lost_hosts")
        self._dismiss(host, f"lost: {reason}", polite=False)
        self._events.grants_lost(grants)
        self._events.fleet_changed()

    def sweep(self) -> None:
        """Stop unused hosts that are draining or unhealthy."""
        for host in list(self.hosts.values()):
            if host.busy or host.state == "gone":
                continue
            if host.state == "draining":
                reason = "; ".join(host.quarantined.values()) or "drained"
                self.retire(host, reason)
            elif host.state == "ready" and host.unhealthy and host.health_failures:
                self.retire(host, host.unhealthy)

    async def close(self) -> None:
        """Stop everything and wait until it is confirmed or given up."""
        for task in list(self._starts.values()):
            task.cancel()
        for host in list(self.hosts.values()):
            self._dismiss(host, "the pool was closed")
        await self._tasks.finish()
        await asyncio.gather(*map(self._end, list(self.leaked)))

    async def _bring_up(self, host: PooledHost) -> None:
        began_s = time.monotonic()
        try:
            await self._create(host)
        except asyncio.CancelledError:
            self._dismiss(host, "the start was cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - whatever a provider raises becomes the reason of a failed start
            self._start_failed(host, error)
            return
        self._metrics.observe("start", time.monotonic() - began_s)
        self._metrics.bump("hosts_started")
        self.failures.clear(host.key)
        self._events.fleet_changed()

    async def _create(self, host: PooledHost) -> None:
        config = self._config
        if not host.adopted:
            await self._intend(host)
        try:
            async with asyncio.timeout(config.start_timeout_s):
                host.host = await self._provider.start(host.name, host.spec)
                client = await self._connect(host.host.address, host.host.token)
        except TimeoutError as error:
            raise HostStartFailed(f"{host.name} was not ready after {config.start_timeout_s:g} s") from error
        host.adopt_client(client)
        if self._health.expires_soon(host) and not host.adopted:
            raise HostStartFailed(f"{host.name} would be ended by its provider before a lease on it can finish")
        check_isolation(client.info, config.min_isolation)
        await self._take_over_slots(host)
        client.on_lost(lambda _: self.lose(host, "the connection to its slot server was lost"))
        await asyncio.to_thread(
            self._journal.running,
            host.name,
            address=host.host.address,
            slots=client.info.slots,
            isolation=client.info.isolation,
        )
        host.state = "ready"
        host.idle_since_s = time.monotonic()
        watch = self._tasks.start(self._health.watch(host))
        host.tasks.add(watch)

    async def _intend(self, host: PooledHost) -> None:
        """Wait for this provider's turn, and write the name down before anything can exist under it."""
        config = self._config
        interval_s = create_interval_s(self._provider, config.create_interval_s)
        delay_s = await asyncio.to_thread(self._journal.reserve_create, config.provider, interval_s)
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        entry = JournalHost(host.name, self._owner.tag(), config.provider, self._settings, host.key, "intent")
        await asyncio.to_thread(self._journal.intend, entry)

    async def _take_over_slots(self, host: PooledHost) -> None:
        """Every slot free; a host found by its name may still hold the leases of a pool that died."""
        assert host.client is not None
        for slot in await host.client.slots():
            state = slot.state
            if state == "leased":
                report = await host.client.release(slot.slot, slot.epoch)
                state = "free" if report.clean else "quarantined"
            if state == "free":
                host.free.append(slot.slot)
            else:
                host.quarantined[slot.slot] = f"slot {slot.slot} was {state} when the host was taken over"
        host.free.reverse()
        if not host.free:
            raise HostStartFailed(f"{host.name} has no usable slot: {'; '.join(host.quarantined.values())}")

    def _start_failed(self, host: PooledHost, error: Exception) -> None:
        self._metrics.bump("start_failures")
        typed = error if isinstance(error, SandboxError) else HostStartFailed(f"{type(error).__name__}: {error}")
        count = self.failures.add(host.key, typed)
        log.warning("host %s did not start (%d in a row): %s", host.name, count, typed)
        never_made = isinstance(typed, PlaceUnreachable) and not host.adopted
        self._dismiss(host, f"did not start: {typed}", exists=not never_made)
        final = count >= self._config.start_attempts or isinstance(typed, IsolationUnavailable)
        if final:
            self.failures.clear(host.key)
        self._events.start_failed(host.key, typed, final=final)

    def _dismiss(self, host: PooledHost, reason: str, *, polite: bool = True, exists: bool = True) -> None:
        if host.state == "gone":
            return
        host.state = "gone"
        host.free.clear()
        host.grants.clear()
        host.snapshots.clear()
        self.hosts.pop(host.name, None)
        self._tasks.start(self._destroy(host, reason, polite=polite) if exists else self._forget(host.name))

    async def _destroy(self, host: PooledHost, reason: str, *, polite: bool) -> None:
        """Make sure the host is gone, then forget it. What cannot be confirmed stays in the journal for `gc`."""
        start = self._starts.get(host.name)
        if start is not None and start is not asyncio.current_task():
            await asyncio.wait({start})
        for task in host.tasks:
            task.cancel()
        if polite and host.client is not None:
            await self._ask_to_end(host.client, host.name)
        # Calls that still wait for an answer of this host raise `SandboxLost` now.
        await host.close_clients()
        try:
            await asyncio.to_thread(self._journal.stopping, host.name, reason)
        except StateError as error:
            log.warning("that %s is being stopped cannot be recorded: %s", host.name, error)
        for pause_s in STOP_BACKOFF_S:
            if await self._end(host.name):
                return
            await asyncio.sleep(pause_s)

    async def _end(self, name: str) -> bool:
        """Have the provider end a host; whether it confirmed that nothing is left."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._provider.stop(name)
        except Exception as error:  # noqa: BLE001 - any provider's fault: tried again, then kept for gc and shown
            reason = str(error) or type(error).__name__
            log.warning("%s could not be stopped: %s", name, reason)
            self.leaked[name] = reason
            return False
        self.leaked.pop(name, None)
        await self._forget(name)
        return True

    async def _forget(self, name: str) -> None:
        try:
            await asyncio.to_thread(self._journal.forget, name)
        except StateError as error:
            # It is gone all the same: the next gc finds nothing under its name and forgets it.
            log.warning("%s stays in the journal: %s", name, error)

    @staticmethod
    async def _ask_to_end(client: HostClient, name: str) -> None:
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                await client.shutdown()
        except (SandboxError, TimeoutError, OSError) as error:
            log.debug("%s did not shut down by itself: %s", name, error)
