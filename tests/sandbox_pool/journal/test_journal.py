import dataclasses
import multiprocessing
import sqlite3
import time

import pytest

from sandbox_pool.errors import JournalDamaged, StateError
from sandbox_pool.journal.journal import (
    Journal,
    JournalHost,
    JournalLease,
    JournalOwner,
    LeaseLog,
    private_state_dir,
    set_damaged_aside,
    without_secrets,
)
from sandbox_pool.journal.owner import this_process

ME = this_process()


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path / "state")
    yield journal
    journal.close()


def intent(name, owner=ME):
    return JournalHost(name, owner.tag(), "local", {"slots": 2, "options": {}}, "key", "intent")


def test_an_intent_is_on_disk_before_intend_returns(journal):
    journal.intend(intent("h1"))
    with sqlite3.connect(journal.path) as other:
        assert other.execute("SELECT name, state FROM hosts").fetchall() == [("h1", "intent")]


def test_the_life_of_a_host(journal):
    journal.intend(intent("h1"))
    journal.running("h1", address="unix:/s", slots=4, isolation="namespaces")
    (host,) = journal.hosts()
    assert (host.state, host.address, host.slots, host.isolation) == ("running", "unix:/s", 4, "namespaces")
    assert host.settings == {"slots": 2, "options": {}}
    journal.stopping("h1", "idle")
    assert [(host.state, host.detail) for host in journal.hosts()] == [("stopping", "idle")]
    journal.forget("h1")
    assert journal.hosts() == []


def test_one_name_is_intended_once(journal):
    journal.intend(intent("h1"))
    with pytest.raises(sqlite3.IntegrityError):
        journal.intend(intent("h1"))
    assert len(journal.hosts()) == 1


def test_of_many_collectors_exactly_one_gets_a_dead_owners_host(journal):
    dead = dataclasses.replace(ME, start_ticks=1)
    journal.intend(intent("h1", dead))
    claimants = [dataclasses.replace(ME, pid=pid) for pid in range(100, 105)]
    assert [journal.claim("h1", dead=dead.tag(), claimant=who) for who in claimants] == [True] + [False] * 4


def test_an_owner_with_hosts_is_not_forgotten(journal):
    journal.beat(ME, "a command")
    journal.intend(intent("h1"))
    journal.forget_owner(ME.tag())
    assert set(journal.owners()) == {ME.tag()}
    journal.forget("h1")
    journal.forget_owner(ME.tag())
    assert journal.owners() == {}


def test_a_heartbeat_moves_on_and_keeps_the_command(journal):
    journal.beat(ME, "a command")
    first = journal.owners()[ME.tag()]
    journal.beat(ME)
    second = journal.owners()[ME.tag()]
    assert second.heartbeat_s >= first.heartbeat_s
    assert second.command == "a command"


def test_creates_are_paced_over_all_users_of_the_journal(journal, tmp_path):
    other = Journal(tmp_path / "state")
    delays = [who.reserve_create("modal", 2.0) for who in (journal, other, journal)]
    other.close()
    assert [round(delay) for delay in delays] == [0, 2, 4]
    assert journal.reserve_create("nomad", 2.0) == 0.0


def test_a_clock_that_jumped_back_does_not_stop_creates_for_hours(journal):
    with sqlite3.connect(journal.path) as db:
        db.execute("INSERT INTO pacing VALUES ('modal', ?)", (time.time() + 9999,))
    assert journal.reserve_create("modal", 0.25) <= 250.0


def test_a_long_line_of_creates_is_paced_to_its_end(journal):
    began_s = time.time()
    for _ in range(300):
        journal.reserve_create("modal", 0.25)
    with sqlite3.connect(journal.path) as db:
        (next_s,) = db.execute("SELECT next_s FROM pacing WHERE provider = 'modal'").fetchone()
    assert next_s - began_s >= 300 * 0.25


def _hammer(path, number):
    journal = Journal(path)
    for n in range(20):
        journal.intend(intent(f"h{number}-{n}"))
    journal.close()


def test_processes_can_write_at_the_same_time(journal):
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_hammer, args=(journal.path.parent, n)) for n in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert len(journal.hosts()) == 60


def test_a_journal_of_a_newer_version_is_refused(journal, tmp_path):
    with sqlite3.connect(journal.path) as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(StateError, match="newer"):
        Journal(tmp_path / "state")


def test_only_its_user_can_read_the_journal(journal):
    assert journal.path.stat().st_mode & 0o077 == 0
    assert journal.path.parent.stat().st_mode & 0o077 == 0


def test_secrets_are_never_stored():
    assert without_secrets({"address": "x", "api_key": "k", "NomadToken": "t", "db_password": "p"}) == {"address": "x"}


def test_the_lease_log_ends_with_the_newest_state_of_each_slot(journal):
    journal.intend(intent("h1"))
    log = LeaseLog(journal)
    lease = JournalLease("h1", 0, 7, "task", 1.0)
    log.record("h1", 0, lease)
    log.record("h1", 1, JournalLease("h1", 1, 8, "other", 1.0))
    log.record("h1", 1, None)
    log.close()
    assert journal.leases() == [lease]


@pytest.mark.parametrize("gone", [False, True])
def test_a_lease_that_is_written_after_its_host_was_lost_is_not_left_behind(journal, gone):
    journal.intend(intent("h1"))
    journal.stopping("h1", "lost")
    if gone:
        journal.forget("h1")
    log = LeaseLog(journal)
    log.record("h1", 0, JournalLease("h1", 0, 7, "task", 1.0))
    log.close()
    assert journal.leases() == []


def test_a_journal_that_cannot_be_written_does_not_stop_the_lease_log(journal, caplog):
    log = LeaseLog(journal)
    with sqlite3.connect(journal.path) as db:
        db.execute("DROP TABLE leases")
    log.record("h1", 0, JournalLease("h1", 0, 1, "task", 1.0))
    log.close()
    assert "cannot be written" in caplog.text


def sqlite_error(code, text="why"):
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (sqlite3.SQLITE_READONLY, "cannot be written (why); set another `state_dir`"),
        (sqlite3.SQLITE_CANTOPEN, "cannot be written (why); set another `state_dir`"),
        (sqlite3.SQLITE_PERM, "cannot be written (why); set another `state_dir`"),
        (sqlite3.SQLITE_FULL, "cannot be written (why): free some disk space, or set another `state_dir`"),
        (sqlite3.SQLITE_IOERR, "cannot be written (why): free some disk space, or set another `state_dir`"),
        (
            sqlite3.SQLITE_BUSY,
            "is locked by another process for 30 s; end that process, or set another `state_dir`",
        ),
        (
            sqlite3.SQLITE_LOCKED,
            "is locked by another process for 30 s; end that process, or set another `state_dir`",
        ),
        (sqlite3.SQLITE_IOERR | (3 << 8), "cannot be written (why): free some disk space, or set another `state_dir`"),
    ],
)
def test_what_the_file_cannot_do_is_said_with_what_would_help(journal, code, said):
    with pytest.raises(StateError) as raised, journal._faults():
        raise sqlite_error(code)
    assert str(raised.value) == f"the journal {journal.path} {said}"
    assert not isinstance(raised.value, JournalDamaged)


def test_a_disk_that_refuses_is_said_too(journal):
    with pytest.raises(StateError) as raised, journal._faults():
        raise OSError(5, "Input/output error")
    assert str(raised.value) == (
        f"the journal {journal.path} cannot be written ([Errno 5] Input/output error); set another `state_dir`"
    )


@pytest.mark.parametrize("error", [sqlite_error(sqlite3.SQLITE_CORRUPT), sqlite3.DatabaseError("why")])
def test_anything_else_is_damage(journal, error):
    with pytest.raises(JournalDamaged) as raised, journal._faults():
        raise error
    assert str(raised.value) == (
        f"the journal {journal.path} is damaged (why): `hermes-rl pool gc --rebuild --state-dir "
        f"{journal.path.parent}` sets it aside and begins a new one from what the providers list"
    )


def test_a_use_after_closing_is_a_mistake_of_ours(tmp_path):
    journal = Journal(tmp_path)
    journal.close()
    with pytest.raises(sqlite3.ProgrammingError):
        journal.hosts()


@pytest.mark.parametrize("damage", [b"not a database at all" * 200, None])
def test_a_damaged_journal_is_refused_and_can_be_set_aside(tmp_path, damage):
    state = tmp_path / "state"
    journal = Journal(state)
    for number in range(200):
        journal.intend(intent(f"h{number}"))
    journal.close()
    assert set_damaged_aside(state) is None, "nothing is wrong with it"
    content = journal.path.read_bytes()
    journal.path.write_bytes(damage or content[:4096] + b"\x55" * 4096 + content[8192:])
    (state / "pool.db-wal").write_bytes(b"")
    with pytest.raises(JournalDamaged):
        Journal(state)
    before = journal.path.read_bytes()
    aside = set_damaged_aside(state)
    assert aside is not None
    assert aside.parent == state
    assert aside.name.startswith("pool.db.damaged-")
    assert aside.read_bytes() == before
    assert sorted(path.name for path in state.iterdir() if not path.name.startswith("pool.db.damaged-")) == []
    Journal(state).close()
    assert set_damaged_aside(state) is None


def test_pages_that_contradict_each_other_are_damage(tmp_path, monkeypatch):
    journal = Journal(tmp_path)

    class Checked:
        def __init__(self, real):
            self.real = real

        def __getattr__(self, name):
            return getattr(self.real, name)

        def execute(self, statement, *values):
            return [("page 7 is twice there",)] if "quick_check" in statement else self.real.execute(statement, *values)

    journal._db = Checked(journal._db)
    with pytest.raises(JournalDamaged, match=r"is damaged \(its pages contradict each other\)"):
        journal._open()
    journal.close()


def test_a_state_directory_that_others_can_change_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(StateError, match=r"^the state directory cannot be used: .*; set another `state_dir`$"):
        Journal(tmp_path)


def test_a_state_directory_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=r"^the state directory .*cannot be used: .+; set another `state_dir`$"):
        Journal(tmp_path / "file")
    with pytest.raises(StateError) as raised:
        private_state_dir(tmp_path / "file" / "below")
    assert str(raised.value) == (
        f"the state directory {tmp_path / 'file' / 'below'} cannot be used: Not a directory; set another `state_dir`"
    )


def test_a_new_name_of_a_newer_format_says_which(journal):
    with sqlite3.connect(journal.path) as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(StateError) as raised:
        Journal(journal.path.parent)
    assert str(raised.value) == f"{journal.path} was written by a newer hermes-rl (journal version 99)"


def test_a_journal_is_safe_from_crashes_and_says_its_version(journal):
    assert journal._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert journal._db.execute("PRAGMA synchronous").fetchone()[0] == 2  # FULL
    assert journal._db.execute("PRAGMA user_version").fetchone()[0] == 1


def test_a_change_that_fails_leaves_nothing_of_itself(journal):
    journal.intend(intent("h1"))
    with pytest.raises(sqlite3.IntegrityError):
        journal.intend(intent("h1"))
    journal.intend(intent("h2"))  # no transaction is left open
    assert [host.name for host in journal.hosts()] == ["h1", "h2"]


def test_hosts_are_in_the_order_of_their_creation(journal, monkeypatch):
    for name, created_s in (("b", 30.0), ("a", 20.0), ("c", 10.0)):
        monkeypatch.setattr("sandbox_pool.journal.journal.time.time", lambda now=created_s: now)
        journal.intend(intent(name))
    assert [(host.name, host.created_s) for host in journal.hosts()] == [("c", 10.0), ("a", 20.0), ("b", 30.0)]
    (first, *_) = journal.hosts()
    assert first == dataclasses.replace(intent("c"), created_s=10.0)


def test_settings_that_are_no_json_are_kept_as_text(journal, tmp_path):
    journal.intend(dataclasses.replace(intent("h1"), settings={"scratch": tmp_path}))
    assert journal.hosts()[0].settings == {"scratch": str(tmp_path)}


def test_what_happens_to_one_host_happens_to_no_other(journal):
    for name in ("h1", "h2"):
        journal.intend(intent(name))
        journal.running(name, address=name, slots=1, isolation="plain")
        journal.write_leases({(name, 0): JournalLease(name, 0, 1, "t", 1.0)})
    journal.running("h1", address="new", slots=2, isolation="uid")
    assert [host.address for host in journal.hosts()] == ["new", "h2"]
    journal.stopping("h1", "idle")
    assert [(host.state, host.detail) for host in journal.hosts()] == [("stopping", "idle"), ("running", "")]
    assert [lease.host for lease in journal.leases()] == ["h2"]
    journal.forget("h1")
    assert [host.name for host in journal.hosts()] == ["h2"]
    journal.forget("h2")
    assert (journal.hosts(), journal.leases()) == ([], [])


def test_leases_are_replaced_ended_and_listed_in_order(journal):
    for name in ("h1", "h2"):
        journal.intend(intent(name))
    first = JournalLease("h2", 0, 1, "one", 1.0)
    newer = JournalLease("h2", 0, 2, "two", 2.0)
    others = [JournalLease("h1", slot, 1, "other", 1.0) for slot in (1, 0)]
    journal.write_leases({("h2", 0): first, **{("h1", lease.slot): lease for lease in others}})
    journal.write_leases({("h2", 0): newer})
    assert journal.leases() == [others[1], others[0], newer]
    journal.write_leases({("h1", 0): None})
    assert journal.leases() == [others[0], newer]


def test_only_a_dead_owners_host_changes_hands(journal):
    dead = dataclasses.replace(ME, start_ticks=1)
    for name in ("h1", "h2"):
        journal.intend(intent(name, dead))
    assert not journal.claim("h1", dead=ME.tag(), claimant=ME)
    assert journal.claim("h1", dead=dead.tag(), claimant=ME)
    assert [host.owner for host in journal.hosts()] == [ME.tag(), dead.tag()]


def test_owners_come_back_as_they_were_written(journal, monkeypatch):
    monkeypatch.setattr("sandbox_pool.journal.journal.time.time", lambda: 10.0)
    journal.beat(ME, "a command")
    monkeypatch.setattr("sandbox_pool.journal.journal.time.time", lambda: 20.0)
    other = dataclasses.replace(ME, pid=1)
    journal.beat(other)
    assert journal.owners() == {
        ME.tag(): JournalOwner(ME, "a command", 10.0),
        other.tag(): JournalOwner(other, "", 20.0),
    }
    journal.beat(ME)
    assert journal.owners()[ME.tag()].heartbeat_s == 20.0
    journal.forget_owner(other.tag())
    assert list(journal.owners()) == [ME.tag()]


def test_the_line_of_creates_exactly(journal, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("sandbox_pool.journal.journal.time.time", lambda: now)
    assert [journal.reserve_create("p", 0.5) for _ in range(3)] == [0.0, 0.5, 1.0]
    now = 1010.0  # the line is over
    assert journal.reserve_create("p", 0.5) == 0.0
    assert journal.reserve_create("p", 0.5) == 0.5
    now = 10.0  # the clock was set back
    assert journal.reserve_create("p", 0.5) == 500.0


def test_a_lease_reaches_the_file_while_the_log_is_open(journal):
    journal.intend(intent("h1"))
    log = LeaseLog(journal)
    lease = JournalLease("h1", 0, 7, "task", 1.0)
    log.record("h1", 0, lease)
    deadline = time.monotonic() + 60
    while journal.leases() != [lease]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    log.record("h1", 0, None)
    while journal.leases():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    log.close()
    assert not log._thread.is_alive()
    assert (log._thread.name, log._thread.daemon) == ("sandbox-pool-lease-log", True)


def test_what_the_lease_log_cannot_write_is_said_once_for_each_time(journal, caplog):
    log = LeaseLog(journal)
    log.close()
    assert caplog.messages == []
    with sqlite3.connect(journal.path) as db:
        db.execute("DROP TABLE leases")
    log.record("h1", 0, None)
    log._flush()
    log._flush()
    (said,) = caplog.messages
    assert said.startswith(f"the lease journal cannot be written: the journal {journal.path} is damaged")
