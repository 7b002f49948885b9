"""The durable record of every host a pool ever asked for, so that nothing is lost when a client dies.

One SQLite file per state directory, shared by all processes of its user. The promise: a host's name is on disk, synced,
*before* its provider is asked to create it, and stays there until the provider has confirmed that it is gone. Leases
are recorded too, for `pool status`; they are written in the background and never slow a lease down.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_pool.errors import JournalDamaged, StateError
from sandbox_pool.journal.owner import Owner
from sandbox_pool.server.host_files import NotPrivate, open_private

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
        except StateError as error:
            # The record of leases is only for display: the pool must go on without it.
            log.warning("the lease journal cannot be written: %s", error)


SCHEMA = """
CREATE TABLE IF NOT EXISTS owners (
    tag TEXT PRIMARY KEY, command TEXT NOT NULL, heartbeat_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS hosts (
    name TEXT PRIMARY KEY, owner TEXT NOT NULL, provider TEXT NOT NULL, settings TEXT NOT NULL, spec_key TEXT NOT NULL,
    state TEXT NOT NULL, address TEXT NOT NULL, slots INTEGER NOT NULL, isolation TEXT NOT NULL, detail TEXT NOT NULL,
    created_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS leases (
    host TEXT NOT NULL, slot INTEGER NOT NULL, epoch INTEGER NOT NULL, task_id TEXT NOT NULL, since_s REAL NOT NULL,
    PRIMARY KEY (host, slot));
CREATE TABLE IF NOT EXISTS pacing (provider TEXT PRIMARY KEY, next_s REAL NOT NULL);
"""
VERSION = 1
LOCK_TIMEOUT_S = 30.0
LONGEST_LINE = 1000
"""Creates that may wait for their turn."""
SECRET = re.compile(r"token|secret|password|passwd|credential|api_?key", re.IGNORECASE)


@dataclass(frozen=True)
class JournalHost:
    """One host as the journal knows it."""

    name: str
    owner: str
    provider: str
    settings: dict[str, Any]
    """What `gc` needs to build the provider again. Never a secret."""
    spec_key: str
    state: str
    """intent (maybe created), running, stopping (being destroyed)"""
    address: str = ""
    slots: int = 0
    isolation: str = ""
    detail: str = ""
    created_s: float = 0.0


@dataclass(frozen=True)
class JournalLease:
    """One lease as last recorded."""

    host: str
    slot: int
    epoch: int
    task_id: str
    since_s: float


@dataclass(frozen=True)
class JournalOwner:
    """A process that owns or owned hosts, and its last heartbeat."""

    owner: Owner
    command: str
    heartbeat_s: float


def without_secrets(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they may be stored, without keys that name a secret: providers read those from the environment."""
    return {key: value for key, value in settings.items() if not SECRET.search(key)}


def private_state_dir(state_dir: Path) -> None:
    """Make the state directory; `StateError` unless only this user can change it: gc believes what it finds there."""
    try:
        os.close(open_private(state_dir, may_be_link=True))
    except NotPrivate as error:
        raise StateError(f"the state directory cannot be used: {error}; set another `state_dir`") from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise StateError(
            f"the state directory {state_dir} cannot be used: {reason}; set another `state_dir`"
        ) from error


def set_damaged_aside(state_dir: Path) -> Path | None:
    """Give a journal that cannot be read another name, so that a new one is begun; its new name, None when it is fine.

    Hosts are then found by what their providers list.
    """
    private_state_dir(state_dir)
    folder = os.open(state_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # two processes that rebuild must not set aside each other's new file
        try:
            Journal(state_dir).close()
        except JournalDamaged:
            target = state_dir / f"pool.db.damaged-{time.time_ns()}"
            for ending in ("-wal", "-shm", ""):
                with suppress(FileNotFoundError):
                    (state_dir / f"pool.db{ending}").rename(f"{target}{ending}")
            return target
        return None
    finally:
        os.close(folder)


def _state_error(path: Path, error: Exception) -> StateError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if isinstance(error, OSError) or code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return StateError(f"the journal {path} cannot be written ({error}); set another `state_dir`")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StateError(
            f"the journal {path} is locked by another process for {LOCK_TIMEOUT_S:g} s; "
            "end that process, or set another `state_dir`"
        )
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return StateError(
            f"the journal {path} cannot be written ({error}): free some disk space, or set another `state_dir`"
        )
    return JournalDamaged(
        f"the journal {path} is damaged ({error}): `hermes-rl pool gc --rebuild --state-dir {path.parent}` sets it "
        "aside and begins a new one from what the providers list"
    )


class Journal:
    """Access to the journal of one state directory. Calls block for a disk write: from a loop, use a thread."""

    def __init__(self, state_dir: Path) -> None:
        private_state_dir(state_dir)
        self.path = state_dir / "pool.db"
        self._lock = threading.Lock()
        with self._faults():
            self._db = sqlite3.connect(self.path, timeout=LOCK_TIMEOUT_S, check_same_thread=False, isolation_level=None)
        try:
            self._open()
        except BaseException:
            self._db.close()
            raise

    def _open(self) -> None:
        self._db.row_factory = sqlite3.Row
        with self._faults():
            self.path.chmod(0o600)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
        with self._transaction():
            found = int(self._db.execute("PRAGMA user_version").fetchone()[0])
            if found > VERSION:
                raise StateError(f"{self.path} was written by a newer hermes-rl (journal version {found})")
            for statement in SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version={VERSION}")
            if any(row[0] != "ok" for row in self._db.execute("PRAGMA quick_check(1)")):
                raise sqlite3.DatabaseError("its pages contradict each other")

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Turn what the file or its disk cannot do into one sentence that says what would help."""
        try:
            yield
        except (sqlite3.ProgrammingError, sqlite3.IntegrityError):
            raise  # a call after `close`, or a name that is taken: no fault of the file
        except (sqlite3.Error, OSError) as error:
            raise _state_error(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._faults():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk has ended it already
                    self._db.execute("ROLLBACK")
                raise

    def beat(self, owner: Owner, command: str = "") -> None:
        """Renew the owner's heartbeat; the first call registers it."""
        with self._transaction() as db:
            db.execute(
                "INSERT INTO owners VALUES (?, ?, ?) "
                "ON CONFLICT (tag) DO UPDATE SET heartbeat_s = excluded.heartbeat_s",
                (owner.tag(), command, time.time()),
            )

    def owners(self) -> dict[str, JournalOwner]:
        """Every owner on record, by tag."""
        with self._lock, self._faults():
            rows = self._db.execute("SELECT tag, command, heartbeat_s FROM owners").fetchall()
        return {row["tag"]: JournalOwner(Owner.parse(row["tag"]), row["command"], row["heartbeat_s"]) for row in rows}

    def forget_owner(self, tag: str) -> None:
        """Remove an owner that has no hosts left."""
        with self._transaction() as db:
            db.execute(
                "DELETE FROM owners WHERE tag = ? AND NOT EXISTS (SELECT 1 FROM hosts WHERE owner = ?)", (tag, tag)
            )

    def intend(self, host: JournalHost) -> None:
        """Write down that this host is about to be created. Durable when it returns."""
        settings = json.dumps(host.settings, default=str)
        with self._transaction() as db:
            db.execute(
                "INSERT INTO hosts VALUES (?, ?, ?, ?, ?, 'intent', '', 0, '', '', ?)",
                (host.name, host.owner, host.provider, settings, host.spec_key, time.time()),
            )

    def running(self, name: str, *, address: str, slots: int, isolation: str) -> None:
        """The host answered."""
        with self._transaction() as db:
            db.execute(
                "UPDATE hosts SET state = 'running', address = ?, slots = ?, isolation = ? WHERE name = ?",
                (address, slots, isolation, name),
            )

    def stopping(self, name: str, detail: str) -> None:
        """The host is being destroyed, for this reason."""
        with self._transaction() as db:
            db.execute("UPDATE hosts SET state = 'stopping', detail = ? WHERE name = ?", (detail, name))
            db.execute("DELETE FROM leases WHERE host = ?", (name,))

    def forget(self, name: str) -> None:
        """The provider confirmed that the host is gone."""
        with self._transaction() as db:
            db.execute("DELETE FROM hosts WHERE name = ?", (name,))
            db.execute("DELETE FROM leases WHERE host = ?", (name,))

    def claim(self, name: str, *, dead: str, claimant: Owner) -> bool:
        """Take over a dead owner's host; False when another process was faster."""
        with self._transaction() as db:
            done = db.execute(
                "UPDATE hosts SET owner = ? WHERE name = ? AND owner = ?", (claimant.tag(), name, dead)
            ).rowcount
        return done == 1

    def hosts(self) -> list[JournalHost]:
        """Every host on record, oldest first."""
        with self._lock, self._faults():
            rows = self._db.execute("SELECT * FROM hosts ORDER BY created_s").fetchall()
        return [JournalHost(**{**dict(row), "settings": json.loads(row["settings"])}) for row in rows]

    def leases(self) -> list[JournalLease]:
        """Leases as last recorded; at most a second behind."""
        with self._lock, self._faults():
            rows = self._db.execute("SELECT * FROM leases ORDER BY host, slot").fetchall()
        return [JournalLease(**dict(row)) for row in rows]

    def reserve_create(self, provider: str, interval_s: float) -> float:
        """Reserve the next moment at which any process may ask this provider to create; seconds until then."""
        now = time.time()
        with self._transaction() as db:
            row = db.execute("SELECT next_s FROM pacing WHERE provider = ?", (provider,)).fetchone()
            # A clock that was set back must not stop creates for hours.
            latest = now + LONGEST_LINE * interval_s
            at = now if row is None else max(now, min(float(row["next_s"]), latest))
            db.execute("INSERT OR REPLACE INTO pacing VALUES (?, ?)", (provider, at + interval_s))
        return at - now

    def write_leases(self, changes: dict[tuple[str, int], JournalLease | None]) -> None:
        """Apply the newest state of some slots: a lease, or None for free.

        They come late: a host that was lost meanwhile has no leases any more, and nobody would end one written now.
        """
        with self._transaction() as db:
            for (host, slot), lease in changes.items():
                if lease is None:
                    db.execute("DELETE FROM leases WHERE host = ? AND slot = ?", (host, slot))
                else:
                    db.execute(
                        "INSERT OR REPLACE INTO leases SELECT ?, ?, ?, ?, ?"
                        " WHERE EXISTS (SELECT 1 FROM hosts WHERE name = ? AND state != 'stopping')",
                        (lease.host, lease.slot, lease.epoch, lease.task_id, lease.since_s, lease.host),
                    )
