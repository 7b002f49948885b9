"""Callers that wait for a slot, first come first served per key. Used only in the pool's own loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from sandbox_pool.pool.host import PooledHost
    from sandbox_pool.pool.snapshot_places import SnapshotLocator


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
        self._lines: dict[str, deque[Waiter]] = {}

    def push(self, waiter: Waiter) -> None:
        """Join the end of the line."""
        self._lines.setdefault(waiter.key, deque()).append(waiter)

    def push_front(self, waiter: Waiter) -> None:
        """Back to the head of the line: the slot this waiter was given turned out to be gone."""
        self._lines.setdefault(waiter.key, deque()).appendleft(waiter)

    def head(self, key: str) -> Waiter | None:
        """The next to be served."""
        line = self._lines.get(key)
        while line:
            if not line[0].granted.done():
                return line[0]
            line.popleft()
        self._lines.pop(key, None)
        return None

    def remove(self, waiter: Waiter) -> None:
        """Leave the line."""
        line = self._lines.get(waiter.key)
        if line and waiter in line:
            line.remove(waiter)

    def count(self, key: str) -> int:
        """How many wait for this key."""
        return sum(1 for waiter in self._lines.get(key, ()) if not waiter.granted.done())

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
