"""`BlockingRollouts`: the same rollouts for code without an event loop. It owns a thread that has one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

from environments.rollouts.rollouts import Rollouts
from environments.rollouts.samples import Sample

T = TypeVar("T")


class BlockingRollouts:
    """`Rollouts` behind plain calls, from any thread.

    with BlockingRollouts(Rollouts("terminal_tasks")) as rollouts:
        for item in rollouts.items():
            samples = rollouts.group(item, 8)

    What still runs at the end of the block is cancelled, and so is what Ctrl-C interrupts.
    """

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self._running: _Running | None = None

    @property
    def opened(self) -> bool:
        """Whether it is inside `with`."""
        return self._running is not None

    def __enter__(self) -> BlockingRollouts:
        if self._running is not None:
            raise RuntimeError("these rollouts are open already")
        self._running = _Running()
        try:
            self.wait(self.rollouts.__aenter__())
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait(self._end_work())
            self.wait(self.rollouts.__aexit__(kind, error, trace))
        finally:
            self._stop()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the thread; anything of `Rollouts` and `ToolSession` must run there."""
        if self._running is None:
            work.close()
            raise RuntimeError("these rollouts are not open: use `with BlockingRollouts(...) as rollouts`")
        return asyncio.run_coroutine_threadsafe(self._running.counted(work), self._running.loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there to its end."""
        if self._running is not None and threading.current_thread() is self._running.thread:
            work.close()
            raise RuntimeError("this is the thread of the rollouts: await the calls of `Rollouts` here")
        future = self.submit(work)
        try:
            return future.result()
        except BaseException:  # Ctrl-C; nothing is left to cancel of work that failed
            future.cancel()
            raise

    def items(self) -> Iterator[Any]:
        """The environment's items, as long as there are any."""
        while (item := self.wait(self.rollouts.env.next_item())) is not None:
            yield item

    def group(self, item: Any, n: int | None = None, *, temperature: float | None = None) -> list[Sample]:
        """See `Rollouts.group`."""
        return self.wait(self.rollouts.group(item, n, temperature=temperature))

    def member(self, item: Any, group: str, *, temperature: float | None = None) -> list[Sample]:
        """See `Rollouts.member`."""
        return self.wait(self.rollouts.member(item, group, temperature=temperature))

    async def _end_work(self) -> None:
        """Cancel what was submitted, before what it uses is closed."""
        assert self._running is not None
        await _cancelled(self._running.tasks - {asyncio.current_task()})

    def _stop(self) -> None:
        async def cancel_rest() -> None:
            await _cancelled(asyncio.all_tasks() - {asyncio.current_task()})

        running = self._running
        assert running is not None
        self.wait(cancel_rest())
        self._running = None
        running.loop.call_soon_threadsafe(running.loop.stop)
        running.thread.join()
        running.loop.close()


class _Running:
    """A thread with an event loop, and what was asked of it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="rollouts", daemon=True)
        self.tasks: set[asyncio.Task[Any] | None] = set()
        self.thread.start()

    async def counted(self, work: Coroutine[Any, Any, T]) -> T:
        """The work, which is in `tasks` as long as it runs."""
        task = asyncio.current_task()
        self.tasks.add(task)
        try:
            return await work
        finally:
            self.tasks.discard(task)


async def _cancelled(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """Returns when they have ended."""
    found = [task for task in tasks if task is not None]
    for task in found:
        task.cancel()
    await asyncio.gather(*found, return_exceptions=True)
