"""The slot pool: hands isolated slots to tasks, first come first served, and takes every one of them back.

Promises: a slot is leased to at most one task; a used slot is proven clean before the next task gets it; cancelling a
task in any phase loses no slot; a host that dies is replaced; what a dead process left behind is found in the journal
and removed.

The pool's state belongs to the event loop that started it. Leases may be taken and used in any other loop: the request
for a slot runs in the pool's loop, and commands use a connection of the caller's loop. Plain threads use
`SlotPool.sync`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sys
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

from sandbox_pool.client.connection import TaskSet
from sandbox_pool.client.trees import TreeLimits
from sandbox_pool.config import PoolConfig
from sandbox_pool.errors import PoolClosed, SandboxError, SandboxLost, StateError
from sandbox_pool.journal.gc import claim_running, collect_orphans
from sandbox_pool.journal.journal import Journal, LeaseLog
from sandbox_pool.journal.owner import this_process
from sandbox_pool.pool import signals
from sandbox_pool.pool.dispatch import Dispatcher
from sandbox_pool.pool.fleet import Fleet
from sandbox_pool.pool.host import Connect, Grant, connect_through
from sandbox_pool.pool.lease import Lease, LeaseRequest
from sandbox_pool.pool.metrics import PoolMetrics
from sandbox_pool.pool.snapshot_places import SnapshotStore
from sandbox_pool.pool.status import PoolStatus, status_of
from sandbox_pool.providers.base import (
    Adopts,
    Closes,
    Dials,
    Host,
    Provider,
    ProviderContext,
    Settles,
    host_keys,
    load_provider,
)
from sandbox_pool.server.isolation.levels import WORKDIR
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from sandbox_pool.pool.sync import SyncSlotPool

log = logging.getLogger(__name__)

HEARTBEAT_S = 10.0
T = TypeVar("T")


class SlotPool:
    """Leases on isolated slots. Use it as `async with SlotPool.from_config(config) as pool`."""

    def __init__(self, config: PoolConfig, provider: Provider | None = None, connect: Connect | None = None) -> None:
        self.config = config
        self.metrics = PoolMetrics()
        self.owner = this_process()
        self._context = ProviderContext.of(config, self.owner.tag())
        self._provider = provider or load_provider(config.provider, self._context, config.provider_options)
        self._host_key = host_keys(self._provider)
        self.connect = connect or connect_through(self._provider)
        """Another client of one of the pool's slot servers: address, token -> client."""
        self._home: asyncio.AbstractEventLoop | None = None
        self._state = "new"
        self._background = TaskSet()

    @classmethod
    def from_config(cls, config: PoolConfig) -> Self:
        """The pool of this config, not started yet."""
        return cls(config)

    @staticmethod
    def sync(config: PoolConfig) -> SyncSlotPool:
        """The same pool for plain threads: `with SlotPool.sync(config) as pool`."""
        from sandbox_pool.pool.sync import SyncSlotPool

        return SyncSlotPool(config)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop the pool lives in, once it was started."""
        return self._home

    @property
    def closed(self) -> bool:
        """Whether the pool gives out no more leases."""
        return self._state == "closed"

    async def start(self) -> None:
        """Open the journal, start the first hosts; raises when none of them can be started."""
        if self._state != "new":
            raise PoolClosed("a pool can be started only once")
        self._state = "open"
        self._home = asyncio.get_running_loop()
        self._journal = await asyncio.to_thread(Journal, self._context.state_dir)
        await asyncio.to_thread(self._journal.beat, self.owner, " ".join(sys.argv)[:200])
        self._lease_log = LeaseLog(self._journal)
        taken = self._provider.settled() if isinstance(self._provider, Settles) else {}
        settings = self._context.settings({**self.config.provider_options, **taken})
        self._place = self.config.provider, settings
        self._dispatcher = Dispatcher(self.config, self.metrics, self._lease_log)
        self._fleet = Fleet(
            self.config,
            self._provider,
            settings,
            self._journal,
            self.owner,
            self.metrics,
            self._dispatcher,
            self.connect,
        )
        default = self.config.spec
        default_key = self._host_key(default)
        if isinstance(self._provider, Adopts) and self._provider.adopts:
            await self._adopt_running(settings, default_key)
        self._dispatcher.serve(self._fleet, default_key, default)
        self._snapshots = SnapshotStore()
        if self.config.handle_sigterm:
            signals.close_on_sigterm(self)
        self._background.start(self._maintain())
        self._background.start(self._collect())
        try:
            await self._dispatcher.first_host()
        except BaseException:
            await self.close()
            raise

    async def _adopt_running(self, settings: dict[str, Any], key: str) -> None:
        names = await asyncio.to_thread(
            claim_running,
            self._journal,
            self.owner,
            provider=self.config.provider,
            settings=settings,
            spec_key=key,
            limit=self.config.max_hosts,
        )
        for name in names:
            self._fleet.adopt(name, key, self.config.spec)

    async def close(self) -> None:
        """Stop every host and wait until nothing of this pool is left. Safe to call twice and from any loop."""
        home = self._home
        if home is None:
            self._state = "closed"
            return
        if asyncio.get_running_loop() is not home:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.close(), home))
            return
        if self._state == "open":
            self._state = "closed"
            self._closing = home.create_task(self._close())
        # Shielded: a second Ctrl-C must not leave hosts behind while the first is still cleaning up.
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        signals.forget(self)
        self._background.cancel()
        await self._background.finish()
        await self._dispatcher.close()
        await self._fleet.close()
        if isinstance(self._provider, Closes):
            await self._provider.close()
        await asyncio.to_thread(self._lease_log.close)
        await asyncio.to_thread(self._journal.forget_owner, self.owner.tag())
        self._journal.close()

    def lease(
        self,
        task_id: str,
        spec: SandboxSpec | None = None,
        timeout_s: float | None = None,
        *,
        ttl_s: float | None = None,
    ) -> LeaseRequest:
        """A slot for this task: `async with pool.lease(...) as sandbox`, or `await` it and `release` it yourself."""
        return LeaseRequest(lambda: self.acquire(task_id, spec, timeout_s, ttl_s=ttl_s))

    def lease_from(
        self, snapshot: str, task_id: str, timeout_s: float | None = None, *, ttl_s: float | None = None
    ) -> LeaseRequest:
        """Like `lease`, but the slot starts with the files of the snapshot: same files, own processes.

        A host that has snapshots is kept while it is idle: call `drop_snapshot` when they are no longer needed.
        """
        return LeaseRequest(lambda: self.acquire(task_id, None, timeout_s, ttl_s=ttl_s, snapshot=snapshot))

    async def acquire(
        self,
        task_id: str,
        spec: SandboxSpec | None = None,
        timeout_s: float | None = None,
        *,
        ttl_s: float | None = None,
        snapshot: str | None = None,
    ) -> Lease:
        """Wait for a slot and hold it until `release`. Cancelling it, at any time, leaves no slot behind."""
        home = self._home
        if home is None or self._state != "open":
            raise PoolClosed("the pool is closed" if self.closed else "the pool was not started")
        began_s = time.monotonic()

        def take() -> Coroutine[Any, Any, Grant]:
            return self._take(task_id, spec, timeout_s, ttl_s, snapshot)

        grant = await call_in_loop(home, take, self._dispatcher.reclaim)
        try:
            client = await grant.host.client_here()
        except BaseException:
            home.call_soon_threadsafe(self._dispatcher.reclaim, grant)
            raise
        self.metrics.observe("acquire", time.monotonic() - began_s)
        return Lease(self, client, grant)

    async def _take(
        self, task_id: str, spec: SandboxSpec | None, timeout_s: float | None, ttl_s: float | None, snapshot: str | None
    ) -> Grant:
        timeout_s = self.config.acquire_timeout_s if timeout_s is None else timeout_s
        if snapshot is not None:
            spec = self._snapshots.spec_of(snapshot)
        spec = spec or self.config.spec
        key = self._host_key(spec)
        locate = None if snapshot is None else self._snapshots.locator(snapshot)
        return await self._dispatcher.acquire(
            task_id, spec, key, timeout_s=timeout_s, ttl_s=ttl_s or self.config.lease_ttl_s, locate=locate
        )

    async def release(self, grant: Grant) -> None:
        """Give a slot back: returns when its processes are gone and its files are dropped. Safe to call twice."""
        assert self._home is not None
        work = self._dispatcher.release(grant)
        if asyncio.get_running_loop() is self._home:
            await work
        else:
            await asyncio.shield(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._home)))

    def remember_snapshot(self, snapshot: str, grant: Grant) -> str:
        """A lease made a snapshot: the pool must know where it is. Its name in this pool."""
        spec = grant.spec
        if spec.image and spec.workdir is None:  # forks start where the image says, whoever asks for them
            spec = spec.model_copy(update={"workdir": grant.workdir})
        return self._snapshots.add(snapshot, grant.host, spec)

    def place_of(self, snapshot: str) -> tuple[str, Host, str, SandboxSpec]:
        """Where another process of ours finds a snapshot: a host's name and address, its id there, and its spec."""
        host, copy = self._snapshots.host_of(snapshot)
        if host.host is None:
            raise SandboxLost(f"the snapshot {snapshot} went away with its host")
        return host.name, host.host, copy, self._snapshots.spec_of(snapshot)

    def relayed(self) -> Dials | None:
        """The provider, where it opens connections itself: another process of ours reaches hosts through it."""
        return self._provider if isinstance(self._provider, Dials) else None

    async def has_snapshot(self, snapshot: str) -> bool:
        """Whether a lease can still start from it: it goes with the hosts that have it."""
        try:
            self._snapshots.locator(snapshot)
        except SandboxError:
            return False
        return True

    async def download_snapshot(self, snapshot: str, local: Path, limits: TreeLimits | None = None) -> None:
        """Copy the working directory out of a snapshot that was taken of it alone; no slot is needed."""
        host, copy = self._snapshots.host_of(snapshot)
        client = await host.client_here()
        workdir = self._snapshots.spec_of(snapshot).workdir or WORKDIR
        await client.download_snapshot(copy, workdir, local, limits or TreeLimits())

    async def export_snapshot(self, snapshot: str) -> AsyncIterator[bytes]:
        """A snapshot as bytes, which `add_snapshot` takes in any later run."""
        host, copy = self._snapshots.host_of(snapshot)
        client = await host.client_here()
        async for chunk in client.export_snapshot(copy):
            yield chunk

    def add_snapshot(self, file: BinaryIO, spec: SandboxSpec) -> str:
        """A snapshot from a file of what `export_snapshot` gave, for leases of this spec; the pool closes the file."""
        return self._snapshots.add_file(file, spec)

    async def import_snapshot(self, chunks: AsyncIterable[bytes], task_id: str, spec: SandboxSpec | None = None) -> str:
        """Bring back what `export_snapshot` gave, on a host with slots of this spec; its name in this pool."""
        async with await self.acquire(task_id, spec) as lease:
            return await lease.import_snapshot(chunks)

    async def drop_snapshot(self, snapshot: str) -> None:
        """Delete a snapshot on every host that has a copy."""
        assert self._home is not None
        work = self._snapshots.drop(snapshot)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._home))

    def status(self) -> PoolStatus:
        """What the pool is doing right now. Seen from another thread it may be a moment old."""
        return status_of(self._fleet, self._dispatcher, self.metrics)

    async def _maintain(self) -> None:
        """Stop idle hosts, retry blocked starts, and renew this process's heartbeat in the journal."""
        beaten_s = time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, self.config.idle_s / 4))
            self._dispatcher.fleet_changed()
            if time.monotonic() - beaten_s > HEARTBEAT_S:
                beaten_s = time.monotonic()
                await self._beat()

    async def _beat(self) -> None:
        try:
            await asyncio.to_thread(self._journal.beat, self.owner)
        except StateError as error:
            # Leases go on without it; on this machine the owner's process itself shows that it lives.
            log.warning("the heartbeat of this pool cannot be written: %s", error)

    async def _collect(self) -> None:
        """Remove what dead processes left behind, while this pool is already serving."""
        try:
            report = await collect_orphans(self._journal, self._context.state_dir, self.owner, places=[self._place])
        except Exception as error:  # noqa: BLE001 - leftovers of others must not stop this pool; gc shows the same fault
            log.warning("leftovers of earlier runs could not be removed: %s", error)
            return
        for action in report.actions:
            # Another place's trouble is for `pool gc` to tell, not for every run.
            told = action.done == "destroyed" or action.provider == self.config.provider
            log.log(logging.INFO if told else logging.DEBUG, "leftovers of earlier runs: %s", action.text())


async def call_in_loop(
    home: asyncio.AbstractEventLoop, call: Callable[[], Coroutine[Any, Any, T]], reclaim: Callable[[T], None]
) -> T:
    """Await `call()` in the loop `home`. Cancelling this cancels the call; a result nobody took is reclaimed.

    `asyncio.run_coroutine_threadsafe` would drop the result of a call that ends while its caller is being cancelled;
    for a lease that would be a leak. Here the lock inside `answer` decides who has the result.
    """
    if asyncio.get_running_loop() is home:
        return await call()
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def finish(task: asyncio.Task[T]) -> None:
        error = PoolClosed("the pool was closed during the call") if task.cancelled() else task.exception()
        if answer.set_running_or_notify_cancel():
            if error is None:
                answer.set_result(task.result())
            else:
                answer.set_exception(error)
        elif error is None:
            reclaim(task.result())

    def begin() -> None:
        task = home.create_task(call())
        task.add_done_callback(finish)
        answer.add_done_callback(lambda _: home.call_soon_threadsafe(task.cancel))

    def reclaim_late(done: concurrent.futures.Future[T]) -> None:
        if not done.cancelled() and done.exception() is None:
            home.call_soon_threadsafe(reclaim, done.result())

    home.call_soon_threadsafe(begin)
    try:
        return await asyncio.wrap_future(answer)
    except asyncio.CancelledError:
        answer.cancel()
        answer.add_done_callback(reclaim_late)
        raise
