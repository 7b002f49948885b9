"""Writes leases into the journal behind the pool's back, so that recording one costs the holder nothing."""

from __future__ import annotations

import logging
import sqlite3
import threading

from sandbox_pool.journal import Journal, JournalLease

log = logging.getLogger(__name__)

INTERVAL_S = 0.5


class LeaseLog:
    """A thread that applies the newest state of each slot about twice a second. Only `pool status` reads it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._pending: dict[tuple[str, int], JournalLease | None] = {}
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sandbox-pool-lease-log", daemon=True)
        self._thread.start()

    def record(self, host: str, slot: int, lease: JournalLease | None) -> None:
        """Note that the slot is leased so, or free."""
        with self._lock:
            self._pending[host, slot] = lease
        self._wake.set()

    def close(self) -> None:
        """Write what is pending and end the thread."""
        self._closed.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            self._flush()
            self._closed.wait(INTERVAL_S)
        self._flush()

    def _flush(self) -> None:
        with self._lock:
            changes, self._pending = self._pending, {}
        if not changes:
            return
        try:
            self._journal.write_leases(changes)
        except sqlite3.Error as error:
            # The record of leases is only for display: the pool must go on without it.
            log.warning("the lease journal cannot be written: %s", error)
