"""The pool without `async`, for scripts and plain threads.

    from concurrent.futures import ThreadPoolExecutor

    from sandbox_pool import PoolConfig, SlotPool

    def solve(number):
        with pool.lease(f"task-{number}") as sandbox:
            return sandbox.exec(f"echo {number}", timeout_s=60).output

    with SlotPool.sync(PoolConfig(slots_per_host=4)) as pool, ThreadPoolExecutor(8) as threads:
        outputs = list(threads.map(solve, range(24)))

The pool runs in an event loop in a thread of its own. A call from any other thread runs there and waits for its result,
so a lease offers the same methods as `Sandbox`, without `await`. Errors are the same too.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from sandbox_pool.config import PoolConfig
from sandbox_pool.pool import signals
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from sandbox_pool.pool.pool import SlotPool
    from sandbox_pool.pool.status import PoolStatus

T = TypeVar("T")


class LoopThread:
    """An event loop that runs in a thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in the loop and wait for the result. Ctrl-C while waiting cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def stop(self) -> None:
        """End the loop and its thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class SyncProxy:
    """Any object with async methods, for plain threads: calls wait, and results with async methods are wrapped too."""

    def __init__(self, target: object, thread: LoopThread) -> None:
        self._target = target
        self._loop_thread = thread

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if not inspect.iscoroutinefunction(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            result = self._loop_thread.run(value(*args, **kwargs))
            return SyncProxy(result, self._loop_thread) if _has_async_methods(result) else result

        call.__name__, call.__doc__ = name, value.__doc__
        return call


class SyncLease(SyncProxy):
    """A leased sandbox: `with pool.lease("task") as box: box.exec("ls")`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class SyncSlotPool:
    """A `SlotPool` for plain threads. Every thread of the process may use it at the same time."""

    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._thread: LoopThread | None = None
        self._pool: SlotPool | None = None

    def __enter__(self) -> Self:
        from sandbox_pool.pool.pool import SlotPool

        if self._config.handle_sigterm:
            signals.install()
        self._thread = LoopThread("sandbox-pool")
        self._pool = SlotPool(self._config)
        try:
            self._thread.run(self._pool.start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def lease(
        self,
        task_id: str,
        spec: SandboxSpec | None = None,
        timeout_s: float | None = None,
        *,
        ttl_s: float | None = None,
    ) -> SyncLease:
        """Wait for a slot; release it by leaving `with` or by `release()`."""
        pool, thread = self._running()
        return SyncLease(thread.run(pool.acquire(task_id, spec, timeout_s, ttl_s=ttl_s)), thread)

    def lease_from(self, snapshot: str, task_id: str, timeout_s: float | None = None) -> SyncLease:
        """A slot that starts with the files of the snapshot."""
        pool, thread = self._running()
        return SyncLease(thread.run(pool.acquire(task_id, None, timeout_s, snapshot=snapshot)), thread)

    def drop_snapshot(self, snapshot: str) -> None:
        """Delete a snapshot on every host that has a copy."""
        pool, thread = self._running()
        thread.run(pool.drop_snapshot(snapshot))

    def status(self) -> PoolStatus:
        """What the pool is doing right now."""
        return self._running()[0].status()

    def close(self) -> None:
        """Stop every host and end the thread. Safe to call twice."""
        thread, self._thread = self._thread, None
        if thread is not None and self._pool is not None:
            try:
                thread.run(self._pool.close())
            finally:
                thread.stop()

    def _running(self) -> tuple[SlotPool, LoopThread]:
        if self._pool is None or self._thread is None:
            raise RuntimeError("the pool is not running: use it as `with SlotPool.sync(config) as pool`")
        return self._pool, self._thread


def _has_async_methods(value: object) -> bool:
    return any(inspect.iscoroutinefunction(member) for member in vars(type(value)).values())
