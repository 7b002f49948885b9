import dataclasses
import multiprocessing
import sqlite3
import time

import pytest

from sandbox_pool.errors import StateError
from sandbox_pool.journal.journal import Journal, JournalHost, JournalLease, LeaseLog, without_secrets
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
