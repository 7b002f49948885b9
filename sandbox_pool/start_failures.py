"""Which starts failed lately, and when each may be tried again."""

from __future__ import annotations

import time

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

    def next_retry_s(self) -> float | None:
        """Seconds until a blocked key may be tried again."""
        now = time.monotonic()
        waits = [at - now for at in self._retry_at_s.values() if at > now]
        return min(waits) if waits else None
