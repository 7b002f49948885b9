"""Garbage collection: what has no living owner goes, everything else stays."""

import dataclasses
import sys
from types import ModuleType

import pytest

from sandbox_pool.journal.gc import claim_running, collect_orphans, default_place
from sandbox_pool.journal.journal import Journal, JournalHost
from sandbox_pool.journal.owner import this_process
from support.pool_fake_host import FakePlace, FakeServer

ME = this_process()
DEAD = dataclasses.replace(ME, start_ticks=1)
SETTINGS = default_place("x")[1]


@pytest.fixture
def place(monkeypatch):
    """A provider `fakes:Place` whose servers live in this process."""
    place = FakePlace(owner=DEAD.tag())
    module = ModuleType("fakes")
    module.Place = lambda context, options: place
    monkeypatch.setitem(sys.modules, "fakes", module)
    return place


@pytest.fixture
def journal(tmp_path):
    journal = Journal(tmp_path)
    yield journal
    journal.close()


def record(journal, name, owner):
    journal.beat(owner)
    journal.intend(JournalHost(name, owner.tag(), "fakes:Place", SETTINGS, "key", "intent"))


def run(place, name):
    place.servers[name] = FakeServer(name, [], {})


async def test_a_dead_owners_host_is_destroyed_and_forgotten(journal, place, tmp_path):
    record(journal, "h1", DEAD)
    run(place, "h1")
    report = await collect_orphans(journal, tmp_path, ME)
    assert [(action.name, action.done) for action in report.actions] == [("h1", "destroyed")]
    assert f"pid {DEAD.pid}" in report.actions[0].text()
    assert (place.servers, journal.hosts(), report.left) == ({}, [], 0)
    assert DEAD.tag() not in journal.owners()


async def test_an_intent_whose_create_never_happened_is_forgotten(journal, place, tmp_path):
    record(journal, "h1", DEAD)
    report = await collect_orphans(journal, tmp_path, ME)
    assert place.stopped == ["h1"]
    assert report.left == 0


async def test_a_living_owners_host_stays(journal, place, tmp_path):
    record(journal, "h1", ME)
    run(place, "h1")
    place.owner = ME.tag()
    report = await collect_orphans(journal, tmp_path, ME)
    assert (report.actions, list(place.servers)) == ([], ["h1"])


async def test_a_host_that_only_its_provider_knows_is_destroyed(journal, place, tmp_path):
    run(place, "lost")
    report = await collect_orphans(journal, tmp_path, ME, places=[("fakes:Place", SETTINGS)])
    assert [(action.name, action.done) for action in report.actions] == [("lost", "destroyed")]
    assert place.servers == {}


async def test_a_host_of_an_owner_elsewhere_that_nobody_heard_of_stays(journal, place, tmp_path):
    run(place, "theirs")
    place.owner = dataclasses.replace(ME, machine="far").tag()
    report = await collect_orphans(journal, tmp_path, ME, places=[("fakes:Place", SETTINGS)])
    assert (report.actions, list(place.servers)) == ([], ["theirs"])


async def test_what_cannot_be_destroyed_is_reported_and_kept_for_the_next_time(journal, place, tmp_path):
    record(journal, "h1", DEAD)
    run(place, "h1")
    place.stop_failures = 1
    place.owner = ME.tag()
    report = await collect_orphans(journal, tmp_path, ME)
    assert report.left == 1
    assert "the place does not answer" in report.actions[0].text()
    assert [host.name for host in journal.hosts()] == ["h1"]
    next_collector = dataclasses.replace(ME, pid=1, start_ticks=2)
    journal.claim("h1", dead=ME.tag(), claimant=next_collector)
    assert (await collect_orphans(journal, tmp_path, ME)).left == 0
    assert journal.hosts() == []


async def test_a_provider_that_cannot_be_loaded_any_more_is_reported(journal, place, tmp_path):
    journal.intend(JournalHost("h1", DEAD.tag(), "gone_module:Place", SETTINGS, "key", "intent"))
    journal.running("h1", address="tcp:far:1", slots=1, isolation="namespaces")
    report = await collect_orphans(journal, tmp_path, ME)
    assert report.left >= 1
    assert "cannot be loaded" in report.actions[0].text()


async def test_an_owner_without_a_readable_name_counts_as_none(journal, place, tmp_path):
    run(place, "old")
    place.owner = "who knows"
    report = await collect_orphans(journal, tmp_path, ME, places=[("fakes:Place", SETTINGS)])
    assert [action.done for action in report.actions] == ["destroyed"]


def test_of_two_pools_that_start_together_one_takes_over_a_dead_ones_host(journal):
    other = dataclasses.replace(ME, pid=ME.pid + 1)
    record(journal, "h1", DEAD)
    journal.running("h1", address="a", slots=1, isolation="plain")
    wanted = {"provider": "fakes:Place", "settings": SETTINGS, "spec_key": "key", "limit": 4}
    assert claim_running(journal, ME, **wanted) == ["h1"]
    assert [host.owner for host in journal.hosts()] == [ME.tag()]
    # The other looked at the journal before that, and still believes that the owner is dead.
    assert not journal.claim("h1", dead=DEAD.tag(), claimant=other)
    assert claim_running(journal, other, **wanted) == []


def test_a_host_that_another_took_first_is_not_taken_over(journal, monkeypatch):
    record(journal, "h1", DEAD)
    journal.running("h1", address="a", slots=1, isolation="plain")
    monkeypatch.setattr(journal, "claim", lambda *_, **__: False)
    assert claim_running(journal, ME, provider="fakes:Place", settings=SETTINGS, spec_key="key", limit=4) == []


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_no_more_hosts_are_taken_over_than_wanted(journal, limit):
    for name in ("h1", "h2", "h3"):
        record(journal, name, DEAD)
        journal.running(name, address="a", slots=1, isolation="plain")
    taken = claim_running(journal, ME, provider="fakes:Place", settings=SETTINGS, spec_key="key", limit=limit)
    assert taken == ["h1", "h2", "h3"][:limit]
