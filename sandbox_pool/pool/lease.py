"""A sandbox held until it is released, and the request for one, which can be awaited or entered."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterable, Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.errors import SandboxLost
from sandbox_pool.results import ExecResult
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from sandbox_pool.client.host_client import HostClient
    from sandbox_pool.pool.host import Grant, PooledHost
    from sandbox_pool.pool.lent_pool import LentPool
    from sandbox_pool.pool.pool import SlotPool
    from sandbox_pool.pool.snapshot_places import SnapshotLocator
    from sandbox_pool.providers.base import Host


@dataclass(eq=False)
class Waiter:
    """One call of `acquire` in line. Its future gets the slot that was taken for it."""

    key: str
    spec: SandboxSpec
    task_id: str
    locate: SnapshotLocator | None
    granted: asyncio.Future[tuple[PooledHost, int]]
    since_s: float = field(default_factory=time.monotonic)


class WaitQueue:
    """One line per key. A waiter that was cancelled or timed out is skipped: it can never take a slot."""

    def __init__(self) -> None:
        self._lines: dict[str, OrderedDict[Waiter, None]] = {}

    def push(self, waiter: Waiter) -> None:
        """Join the end of the line."""
        self._lines.setdefault(waiter.key, OrderedDict())[waiter] = None

    def push_front(self, waiter: Waiter) -> None:
        """Back to the head of the line: the slot this waiter was given turned out to be gone."""
        self.push(waiter)
        self._lines[waiter.key].move_to_end(waiter, last=False)

    def head(self, key: str) -> Waiter | None:
        """The next to be served."""
        line = self._lines.get(key)
        while line:
            waiter = next(iter(line))
            if not waiter.granted.done():
                return waiter
            del line[waiter]
        self._lines.pop(key, None)
        return None

    def remove(self, waiter: Waiter) -> None:
        """Leave the line."""
        self._lines.get(waiter.key, OrderedDict()).pop(waiter, None)

    def count(self, key: str) -> int:
        """How many wait for this key. Whoever gives up leaves the line, and the others are served in turn: so only its
        head can hold some that do not wait any more."""
        return len(self._lines[key]) if self.head(key) is not None else 0

    def waiting(self) -> Iterator[Waiter]:
        """All waiters, in no particular order between keys."""
        for line in self._lines.values():
            yield from (waiter for waiter in line if not waiter.granted.done())

    def waited_keys(self) -> list[str]:
        """Keys with waiters, the longest wait first."""
        heads = [head for key in list(self._lines) if (head := self.head(key)) is not None]
        return [waiter.key for waiter in sorted(heads, key=lambda waiter: waiter.since_s)]

    def fail(self, error: Exception, key: str | None = None) -> None:
        """Give every waiter (of one key) this error instead of a slot."""
        for waiter in list(self.waiting()):
            if key is None or waiter.key == key:
                waiter.granted.set_exception(error)


ANSWER_GRACE_S = 30.0


class Lease(Sandbox):
    """A sandbox that belongs to one task. Once it was released or taken back, calls raise `StaleLease`."""

    def __init__(self, pool: SlotPool | LentPool, client: HostClient, grant: Grant) -> None:
        super().__init__(
            client.connection,
            grant.slot,
            grant.epoch,
            task_id=grant.task_id,
            spec=grant.spec,
            isolation=client.info.isolation,
            workdir=grant.workdir,
        )
        self.host_info = client.info
        self._client = client
        self._pool = pool
        self._grant = grant

    @property
    def host(self) -> str:
        """Name of the host the slot is on."""
        return self._grant.host.name

    @property
    def endpoint(self) -> Host:
        """Address and token of that host, for tools that speak to it directly."""
        assert self._grant.host.host is not None
        return self._grant.host.host

    async def exec(self, command: str, *, timeout_s: float | None = None, **options: Any) -> ExecResult:
        """As `Sandbox.exec`; the pool keeps the latency for its metrics.

        The server enforces the timeout. No answer `ANSWER_GRACE_S` after it is `SandboxLost`.
        """
        if timeout_s is None:
            timeout_s = self._pool.config.exec_timeout_s
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(None if timeout_s is None else timeout_s + ANSWER_GRACE_S):
                result = await super().exec(command, timeout_s=timeout_s, **options)
        except TimeoutError as error:
            raise SandboxLost(f"{self.host} gave no answer {ANSWER_GRACE_S:g} s after the command's timeout") from error
        self._pool.metrics.observe("exec", time.monotonic() - began_s)
        return result

    async def snapshot(self, *, workspace: bool = False, keep_state: bool = False, stop: bool = False) -> str:
        """As `Sandbox.snapshot`; the pool learns where it is, so that `lease_from` can use it."""
        return self.remember_snapshot(await super().snapshot(workspace=workspace, keep_state=keep_state, stop=stop))

    def remember_snapshot(self, snapshot: str) -> str:
        """Tell the pool of a snapshot that was made on this host; its name there."""
        return self._pool.remember_snapshot(snapshot, self._grant)

    async def import_snapshot(self, chunks: AsyncIterable[bytes]) -> str:
        """Bring a snapshot to the host of this slot; its name in the pool."""
        return self.remember_snapshot(await self._client.import_snapshot(chunks))

    async def release(self) -> None:
        """Give the slot back; returns when its processes are gone and its files are dropped. Safe to call twice."""
        await self._pool.release(self._grant)

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.release()


class LeaseRequest:
    """What `pool.lease` returns: `async with` holds the sandbox for a block, `await` gives it to you to `release`."""

    def __init__(self, acquire: Callable[[], Awaitable[Lease]]) -> None:
        self._acquire = acquire
        self._lease: Lease | None = None

    def __await__(self) -> Generator[Any, None, Lease]:
        return self._acquire().__await__()

    async def __aenter__(self) -> Lease:
        self._lease = await self._acquire()
        return self._lease

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lease is not None:
            await self._lease.release()
