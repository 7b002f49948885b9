"""`BlockingRollouts`: the same rollouts for code without an event loop. It owns a thread that has one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
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
    """

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)

    @property
    def opened(self) -> bool:
        """Whether it is inside `with`."""
        return self._thread.is_alive()

    def __enter__(self) -> BlockingRollouts:
        self._thread.start()
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
            self.wait(self.rollouts.__aexit__(kind, error, trace))
        finally:
            self._stop()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the thread; anything of `Rollouts` and `ToolSession` must run there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there to its end."""
        return self.submit(work).result()

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

    def _stop(self) -> None:
        async def cancel_rest() -> None:
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        self.wait(cancel_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
