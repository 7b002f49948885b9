"""Gives slots to waiters and takes them back: the part of the pool that must never lose one.

Runs in the pool's own loop, so nothing changes between two awaits. Work that must go on after its caller was cancelled
(a lease that comes through late, a reset) runs in a task of the dispatcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sandbox_pool.client.connection import TaskSet
from sandbox_pool.config import PoolConfig
from sandbox_pool.errors import AcquireTimeout, PoolClosed, SandboxError, SandboxLost, ScratchFull, StaleLease
from sandbox_pool.journal.journal import JournalLease, LeaseLog
from sandbox_pool.pool.fleet import Fleet
from sandbox_pool.pool.host import Grant, PooledHost, plan
from sandbox_pool.pool.lease import Waiter, WaitQueue
from sandbox_pool.pool.metrics import PoolMetrics
from sandbox_pool.pool.snapshot_places import SnapshotLocator
from sandbox_pool.pool.status import describe_wait
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from sandbox_pool.images.supply import Images

log = logging.getLogger(__name__)


class Resets:
    """Resets slots. Every path ends with the slot free, quarantined, or lost with its host."""

    def __init__(
        self, timeout_s: float, fleet: Fleet, metrics: PoolMetrics, on_done: Callable[[PooledHost], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._fleet = fleet
        self._metrics = metrics
        self._on_done = on_done

    async def reset(self, grant: Grant) -> None:
        """Reset the slot of a lease that is over."""
        began_s = time.monotonic()
        problem = await self._release(grant.host, grant.slot, grant.epoch)
        self._metrics.observe("reset", time.monotonic() - began_s)
        self._settle(grant.host, grant.slot, problem)

    async def recover(self, host: PooledHost, slot: int, error: Exception) -> None:
        """Leasing failed at the server: find out what became of the slot, and get it back or give it up."""
        if isinstance(error, SandboxLost) and not isinstance(error, StaleLease) and host.client_is_dead():
            self._fleet.lose(host, str(error))
        if host.state == "gone":
            return
        self._settle(host, slot, await self._recovery_problem(host, slot))

    async def _recovery_problem(self, host: PooledHost, slot: int) -> str:
        assert host.client is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                states = {state.slot: state for state in await host.client.slots()}
        except (TimeoutError, SandboxError) as error:
            return f"the state of slot {slot} is unknown: {str(error) or 'no answer'}"
        state = states.get(slot)
        if state is not None and state.state == "leased":
            return await self._release(host, slot, state.epoch)
        if state is not None and state.state == "free":
            return ""
        return f"slot {slot} is {state.state if state else 'missing'}"

    async def _release(self, host: PooledHost, slot: int, epoch: int) -> str:
        """Reset the slot; why it cannot be used again, or nothing."""
        assert host.client is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                report = await host.client.release(slot, epoch)
        except TimeoutError:
            return f"slot {slot} was not reset after {self._timeout_s:g} s"
        except SandboxError as error:
            return f"slot {slot} could not be reset: {error}"
        return "" if report.clean else f"slot {slot} is not clean: {'; '.join(report.problems)}"

    def _settle(self, host: PooledHost, slot: int, problem: str) -> None:
        if host.state == "gone":
            return
        if problem:
            log.warning("%s: %s; the host will be replaced", host.name, problem)
            self._metrics.bump("quarantines")
            host.quarantine(slot, problem)
        else:
            host.put_back(slot)
        self._on_done(host)


class Dispatcher:
    """Matches waiters with free slots, asks for more hosts, resets what comes back."""

    def __init__(self, config: PoolConfig, metrics: PoolMetrics, lease_log: LeaseLog) -> None:
        self.queue = WaitQueue()
        self._config = config
        self._metrics = metrics
        self._lease_log = lease_log
        self._tasks = TaskSet()
        self._expiries: dict[Grant, asyncio.TimerHandle] = {}
        self._idle_checks: dict[Grant, asyncio.TimerHandle] = {}
        self._closed = False

    @functools.cached_property
    def _images(self) -> Images:
        """Imported when a spec names an image: most pools have none."""
        from sandbox_pool.images.supply import Images

        return Images(self._config.images)

    def serve(self, fleet: Fleet, default_key: str, default_spec: SandboxSpec) -> None:
        """Begin to give out slots of this fleet; its first hosts are for the default spec."""
        self._fleet = fleet
        self._resets = Resets(self._config.reset_timeout_s, fleet, self._metrics, self._slot_returned)
        self._default = (default_key, default_spec)
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.scale()

    async def first_host(self) -> None:
        """Return when one host serves; raise what kept all of them from it. At once when none is asked for."""
        if self._config.min_hosts:
            await self._first

    async def close(self) -> None:
        """Fail all waiters and stop all timers."""
        self._closed = True
        if not self._first.done():
            self._first.cancel()
        self.queue.fail(PoolClosed("the pool was closed"))
        for timer in (*self._expiries.values(), *self._idle_checks.values()):
            timer.cancel()
        await self._tasks.finish()
        if "_images" in vars(self):
            await self._images.close()

    async def acquire(
        self,
        task_id: str,
        spec: SandboxSpec,
        key: str,
        *,
        timeout_s: float | None,
        ttl_s: float | None,
        locate: SnapshotLocator | None,
    ) -> Grant:
        """Wait for a slot and lease it."""
        loop = asyncio.get_running_loop()
        waiter = Waiter(key, spec, task_id, locate, loop.create_future())
        self._refuse_if_full(key)
        self.queue.push(waiter)
        self._dispatch(key)
        while True:
            if not waiter.granted.done():
                self.scale()
            host, slot = await self._await_slot(waiter, timeout_s)
            try:
                grant = await self._lease(waiter, host, slot, timeout_s)
            except SandboxLost:
                if host.state != "gone":
                    raise
                # Nothing ran yet: the head of the line is the right place to wait for another host.
                waiter.granted = loop.create_future()
                self.queue.push_front(waiter)
                self._dispatch(key)
                continue
            if ttl_s is not None:
                self._expiries[grant] = loop.call_later(ttl_s, self._expire, grant)
            self._check_idle_in(self._config.lease_idle_s, grant)
            return grant

    async def _await_slot(self, waiter: Waiter, timeout_s: float | None) -> tuple[PooledHost, int]:
        if not waiter.granted.done():
            try:
                await asyncio.wait({waiter.granted}, timeout=self._left(waiter, timeout_s))
            except asyncio.CancelledError:
                self._withdraw(waiter)
                raise
            if not waiter.granted.done():
                self._withdraw(waiter)
                self._metrics.bump("acquire_timeouts")
                raise AcquireTimeout(describe_wait(waiter, self._fleet, self.queue))
        return waiter.granted.result()

    @staticmethod
    def _left(waiter: Waiter, timeout_s: float | None) -> float | None:
        return None if timeout_s is None else max(0.0, waiter.since_s + timeout_s - time.monotonic())

    def _withdraw(self, waiter: Waiter) -> None:
        """Leave the line; a slot that was just handed over goes to the next."""
        self.queue.remove(waiter)
        if not waiter.granted.done():
            waiter.granted.cancel()
        elif waiter.granted.exception() is None:
            host, slot = waiter.granted.result()
            host.put_back(slot)
            self._dispatch(host.key)

    async def _lease(self, waiter: Waiter, host: PooledHost, slot: int, timeout_s: float | None) -> Grant:
        task = self._tasks.start(self._lease_at_server(waiter, host, slot))
        try:
            await asyncio.wait({task}, timeout=self._left(waiter, timeout_s))
        except asyncio.CancelledError:
            task.add_done_callback(self._reclaim_late)
            raise
        if not task.done():
            task.add_done_callback(self._reclaim_late)
            self._metrics.bump("acquire_timeouts")
            raise AcquireTimeout(f"{host.name} did not finish leasing slot {slot} to {waiter.task_id} in time")
        return task.result()

    async def _lease_at_server(self, waiter: Waiter, host: PooledHost, slot: int) -> Grant:
        client = host.client
        if client is None or host.state == "gone":
            raise SandboxLost(f"{host.name} is gone")
        try:
            snapshot = await waiter.locate.place(host) if waiter.locate else None
            if waiter.spec.image and waiter.spec.image != client.info.image and not waiter.spec.image.startswith("/"):
                box = await self._images.lease(host, client, slot, waiter.task_id, waiter.spec, snapshot)
            else:
                box = await client.lease(slot, task_id=waiter.task_id, spec=waiter.spec, snapshot=snapshot)
        except Exception as error:
            await self._resets.recover(host, slot, error)
            raise
        if host.state == "gone":
            raise SandboxLost(f"{host.name} went away while slot {slot} was leased")
        grant = Grant(host, slot, box.epoch, waiter.task_id, waiter.spec, box.workdir)
        self._metrics.bump("leases")
        if host.leased(grant):
            self._metrics.bump("reuses")
        self._lease_log.record(host.name, slot, JournalLease(host.name, slot, box.epoch, waiter.task_id, time.time()))
        return grant

    def _reclaim_late(self, task: asyncio.Task[Grant]) -> None:
        if not task.cancelled() and task.exception() is None:
            self.reclaim(task.result())

    def reclaim(self, grant: Grant) -> None:
        """Take a slot back in the background."""
        if self._give_up(grant):
            self._tasks.start(self._resets.reset(grant))

    async def release(self, grant: Grant) -> None:
        """Take a slot back; returns when it is reset. Cancelling the caller does not stop the reset."""
        if self._give_up(grant):
            await asyncio.shield(self._tasks.start(self._resets.reset(grant)))

    def _give_up(self, grant: Grant) -> bool:
        for timer in (self._expiries.pop(grant, None), self._idle_checks.pop(grant, None)):
            if timer is not None:
                timer.cancel()
        if not grant.host.give_up(grant):
            return False
        self._lease_log.record(grant.host.name, grant.slot, None)
        return True

    def _expire(self, grant: Grant) -> None:
        log.warning("the lease of %s on %s slot %d ran out", grant.task_id, grant.host.name, grant.slot)
        self._metrics.bump("expired_leases")
        self.reclaim(grant)

    def _check_idle_in(self, after_s: float | None, grant: Grant) -> None:
        if after_s is not None and not self._closed:
            timer = asyncio.get_running_loop().call_later(
                after_s, lambda: self._tasks.start(self._end_when_idle(grant, self._config.lease_idle_s or 0.0))
            )
            self._idle_checks[grant] = timer

    async def _end_when_idle(self, grant: Grant, allowed_s: float) -> None:
        """The server knows when the slot was used last, whoever uses it."""
        left_s = allowed_s
        client = grant.host.client
        with contextlib.suppress(SandboxError):  # a host that does not answer is for the health checks to judge
            slots = await client.slots() if client else []
            idle_s = next((slot.idle_s for slot in slots if (slot.slot, slot.epoch) == (grant.slot, grant.epoch)), None)
            left_s = allowed_s if idle_s is None else allowed_s - idle_s
        if grant not in self._idle_checks:  # given back meanwhile
            return
        if left_s > 0:
            self._check_idle_in(left_s, grant)
        else:
            self._expire(grant)

    def _slot_returned(self, host: PooledHost) -> None:
        if host.state == "ready":
            self._dispatch(host.key)
        else:
            self.fleet_changed()

    def _dispatch(self, key: str) -> None:
        """Serve the line of this key as long as there are free slots."""
        while (waiter := self.queue.head(key)) is not None:
            host = self._pick(waiter)
            if host is None:
                return
            waiter.granted.set_result((host, host.take()))

    def _pick(self, waiter: Waiter) -> PooledHost | None:
        """The host with most free slots, so that load spreads; for a snapshot, a host that has it comes first."""
        usable = [host for host in self._fleet.hosts.values() if host.key == waiter.key and host.free and host.serves]
        locate = waiter.locate
        if locate is not None:
            usable = [host for host in usable if locate.is_on(host)] or usable
        return max(usable, key=lambda host: len(host.free), default=None)

    def scale(self) -> None:
        """Start and stop hosts as demand requires."""
        if self._closed:
            return
        waiting = {key: self.queue.count(key) for key in self.queue.waited_keys()}
        views = [host.view() for host in self._fleet.counted()]
        key, spec = self._default
        steps = plan(views, waiting, self._config, default_key=key, blocked=self._fleet.failures.blocked())
        for name in steps.stop:
            self._fleet.retire(self._fleet.hosts[name], "idle")
        for wanted in steps.start:
            head = self.queue.head(wanted)
            self._fleet.grow(wanted, head.spec if head else spec)

    def fleet_changed(self) -> None:
        """Part of FleetEvents: slots or hosts came or went."""
        self._fleet.sweep()
        if not self._first.done() and any(host.serves for host in self._fleet.hosts.values()):
            self._first.set_result(None)
        for key in self.queue.waited_keys():
            self._dispatch(key)
        self.scale()

    def start_failed(self, key: str, error: Exception, *, final: bool) -> None:
        """Part of FleetEvents: tell those who wait, once it is final."""
        if final:
            if not self._first.done():
                self._first.set_exception(error)
                self._first.exception()  # with min_hosts=0 nothing awaits it
            if not any(host.serves for host in self._fleet.hosts.values() if host.key == key):
                self.queue.fail(error, key)

    def grants_lost(self, grants: list[Grant]) -> None:
        """Part of FleetEvents: leases that went with their host."""
        self._metrics.bump("lost_leases", len(grants))
        for grant in grants:
            self._give_up(grant)

    def _refuse_if_full(self, key: str) -> None:
        # One that is starting may be on another machine, with room.
        hosts = [host for host in self._fleet.counted() if host.key == key]
        if hosts and all(host.scratch_full for host in hosts):
            raise ScratchFull(hosts[0].unhealthy)
