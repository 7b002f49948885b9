"""Garbage collection: what has no living owner goes, everything else stays."""

import asyncio
import dataclasses
import sys
from types import ModuleType, SimpleNamespace

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


class Closing(FakePlace):
    """A place with connections of its own."""

    closed = 0

    async def close(self):
        self.closed += 1


@pytest.fixture
def closing(monkeypatch):
    place = Closing(owner=DEAD.tag())
    module = ModuleType("fakes")
    module.given = []

    def make(context, options):
        module.given.append((context, options))
        return place

    module.Place = make
    monkeypatch.setitem(sys.modules, "fakes", module)
    place.given = module.given
    return place


def said(report):
    return [(action.name, action.provider, action.done, action.reason) for action in report.actions]


async def test_what_was_done_is_said_in_full(journal, place, tmp_path):
    record(journal, "h1", DEAD)
    journal.running("h1", address="a", slots=1, isolation="namespaces")
    run(place, "unknown")
    report = await collect_orphans(journal, tmp_path, ME)
    assert sorted(said(report)) == [
        ("h1", "fakes:Place", "destroyed", f"its owner (pid {DEAD.pid}) is dead; it was running"),
        ("unknown", "fakes:Place", "destroyed", "not in the journal, running, no living owner"),
    ]
    assert report.actions[0].text() == (
        f"destroyed h1 (fakes:Place): its owner (pid {DEAD.pid}) is dead; it was running"
    )


@pytest.mark.parametrize("level", ["landlock", "uid", "plain"])
async def test_a_weaker_level_is_said_to_leave_perhaps_something(journal, place, tmp_path, level):
    record(journal, "h1", DEAD)
    journal.running("h1", address="a", slots=1, isolation=level)
    (action,) = (await collect_orphans(journal, tmp_path, ME)).actions
    assert action.done == "destroyed"
    assert action.reason.endswith(
        f"; it was running; at the level {level} a process that hid itself before the host was killed may be left"
    )


async def test_what_another_collector_took_first_is_left_to_it(journal, place, tmp_path, monkeypatch):
    record(journal, "h1", DEAD)
    run(place, "h1")
    monkeypatch.setattr(journal, "claim", lambda *_, **__: False)
    report = await collect_orphans(journal, tmp_path, ME)
    assert (report.actions, list(place.servers)) == ([], ["h1"])


async def test_an_unrecorded_host_that_cannot_be_destroyed_is_reported(journal, place, tmp_path):
    run(place, "lost")
    place.stop_failures = 1
    report = await collect_orphans(journal, tmp_path, ME, places=[("fakes:Place", SETTINGS)])
    assert said(report) == [("lost", "fakes:Place", "failed", "ConnectionError: the place does not answer")]
    assert report.left == 1


async def test_a_provider_is_made_as_it_was_and_closed_each_time(journal, closing, tmp_path):
    settings = {**SETTINGS, "slots": 7, "options": {"where": "there"}}
    journal.beat(DEAD)
    journal.intend(JournalHost("h1", DEAD.tag(), "fakes:Place", settings, "key", "intent"))
    await collect_orphans(journal, tmp_path, ME)
    assert closing.closed == len(closing.given) == 2  # one lists, one stops
    for context, options in closing.given:
        assert options == {"where": "there"}
        assert (context.owner, context.state_dir, context.slots) == (ME.tag(), tmp_path, 7)


async def test_a_provider_is_closed_after_a_failure_too(journal, closing, tmp_path):
    record(journal, "h1", DEAD)
    closing.stop_failures = 1
    await collect_orphans(journal, tmp_path, ME)
    assert closing.closed == 2


class TestAPlaceThatCannotBeAsked:
    @pytest.fixture
    def silent(self, place, monkeypatch):
        async def refuse():
            raise OSError

        monkeypatch.setattr(place, "list", refuse)
        return place

    async def test_keeps_what_may_still_come_up(self, journal, silent, tmp_path):
        record(journal, "h1", DEAD)
        report = await collect_orphans(journal, tmp_path, ME)
        reason = "fakes:Place cannot be asked what is there: OSError"
        assert said(report) == [
            ("h1", "fakes:Place", "kept", f"{reason}; it was never seen running and expires by itself")
        ]
        assert [host.owner for host in journal.hosts()] == [DEAD.tag()]
        assert (report.left, silent.stopped) == (0, [])

    @pytest.mark.parametrize(("age_s", "done"), [(-1.0, "kept"), (0.0, "expired")])
    async def test_forgets_what_was_never_seen_for_an_hour(self, journal, silent, tmp_path, monkeypatch, age_s, done):
        record(journal, "h1", DEAD)
        (host,) = journal.hosts()
        now = host.created_s + 3600.0 + age_s
        monkeypatch.setattr("sandbox_pool.journal.gc.time.time", lambda: now)
        report = await collect_orphans(journal, tmp_path, ME)
        assert [action.done for action in report.actions] == [done]
        if done == "expired":
            reason = "fakes:Place cannot be asked what is there: OSError; it was never seen running"
            assert said(report) == [("h1", "fakes:Place", "expired", reason)]
            assert journal.hosts() == []

    async def test_forgets_nothing_that_another_took_first(self, journal, silent, tmp_path, monkeypatch):
        record(journal, "h1", DEAD)
        now = journal.hosts()[0].created_s + 4000
        monkeypatch.setattr("sandbox_pool.journal.gc.time.time", lambda: now)
        monkeypatch.setattr(journal, "claim", lambda *_, **__: False)
        report = await collect_orphans(journal, tmp_path, ME)
        assert report.actions == []
        assert [host.name for host in journal.hosts()] == ["h1"]

    async def test_fails_for_what_was_running_there(self, journal, silent, tmp_path):
        record(journal, "h1", DEAD)
        journal.running("h1", address="a", slots=1, isolation="plain")
        report = await collect_orphans(journal, tmp_path, ME)
        reason = "fakes:Place cannot be asked what is there: OSError"
        assert said(report) == [("h1", "fakes:Place", "failed", reason)]
        assert [host.owner for host in journal.hosts()] == [DEAD.tag()]

    async def test_is_a_failure_of_its_own_when_it_was_named(self, journal, silent, tmp_path):
        report = await collect_orphans(journal, tmp_path, ME, places=[("fakes:Place", SETTINGS)])
        reason = "fakes:Place cannot be asked what is there: OSError"
        assert said(report) == [("*", "fakes:Place", "failed", reason)]
        assert report.left == 1

    async def test_keeps_no_other_from_being_cleaned(self, journal, silent, tmp_path):
        record(journal, "h1", DEAD)
        journal.running("h1", address="a", slots=1, isolation="plain")
        other = FakePlace(owner=DEAD.tag())
        sys.modules["fakes"].Other = lambda context, options: other
        run(other, "lost")
        report = await collect_orphans(journal, tmp_path, ME, places=[("fakes:Other", SETTINGS)])
        assert sorted((action.name, action.done) for action in report.actions) == [
            ("h1", "failed"),
            ("lost", "destroyed"),
        ]


async def test_a_place_that_hangs_is_given_up(journal, place, tmp_path, monkeypatch):
    monkeypatch.setattr("sandbox_pool.journal.gc.LIST_TIMEOUT_S", 0.01)
    monkeypatch.setattr(place, "list", asyncio.Event().wait)
    report = await asyncio.wait_for(collect_orphans(journal, tmp_path, ME, places=[("fakes:Place", SETTINGS)]), 30)
    # This machine may be slower than that, too.
    (reason,) = [action.reason for action in report.actions if action.provider == "fakes:Place"]
    assert reason == "fakes:Place cannot be asked what is there: TimeoutError"


async def test_a_stop_that_hangs_is_given_up(journal, place, tmp_path, monkeypatch):
    monkeypatch.setattr("sandbox_pool.journal.gc.STOP_TIMEOUT_S", 0.01)

    async def hang(_):
        await asyncio.Event().wait()

    monkeypatch.setattr(place, "stop", hang)
    record(journal, "h1", DEAD)
    report = await asyncio.wait_for(collect_orphans(journal, tmp_path, ME), 30)
    assert said(report) == [("h1", "fakes:Place", "failed", "TimeoutError: ")]
    assert [host.name for host in journal.hosts()] == ["h1"]


async def test_eight_hosts_are_destroyed_at_a_time(journal, place, tmp_path, monkeypatch):
    running, most = 0, 0

    async def stop(name):
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.01)
        running -= 1

    monkeypatch.setattr(place, "stop", stop)
    for number in range(12):
        record(journal, f"h{number}", DEAD)
        run(place, f"unknown{number}")
    report = await collect_orphans(journal, tmp_path, ME)
    assert (len(report.actions), most) == (24, 8)


async def test_owners_are_forgotten_when_they_are_dead_and_have_nothing(journal, place, tmp_path):
    alive = dataclasses.replace(ME, machine="far")
    for owner in (DEAD, alive):
        journal.beat(owner)
    await collect_orphans(journal, tmp_path, ME)
    assert set(journal.owners()) == {alive.tag(), ME.tag()}


async def test_a_dead_owners_host_goes_although_another_at_that_place_is_alive(journal, place, tmp_path):
    record(journal, "mine", ME)
    record(journal, "dead", DEAD)
    for name in ("mine", "dead"):
        run(place, name)
    report = await collect_orphans(journal, tmp_path, ME)
    assert [action.name for action in report.actions] == ["dead"]
    assert list(place.servers) == ["mine"]


async def test_a_host_that_two_places_list_is_destroyed_once(journal, place, tmp_path):
    run(place, "lost")
    other = {**SETTINGS, "slots": 2}
    report = await collect_orphans(journal, tmp_path, ME, places=[("fakes:Place", SETTINGS), ("fakes:Place", other)])
    assert [action.name for action in report.actions] == ["lost"]


def test_only_what_was_started_in_the_same_way_is_taken_over(journal):
    ways = {
        "provider": {"provider": "other:Place"},
        "key": {"spec_key": "other"},
        "settings": {"settings": {**SETTINGS, "slots": 9}},
    }
    wanted = {"provider": "fakes:Place", "settings": SETTINGS, "spec_key": "key", "limit": 4}
    record(journal, "h1", DEAD)
    assert claim_running(journal, ME, **wanted) == [], "it does not run yet"
    journal.running("h1", address="a", slots=1, isolation="plain")
    for changed in ways.values():
        assert claim_running(journal, ME, **{**wanted, **changed}) == []
    assert claim_running(journal, ME, **{**wanted, "settings": {**SETTINGS, "scratch_dir": None}}) == ["h1"]


def test_what_nobody_set(tmp_path):
    assert default_place("p") == (
        "p",
        {"slots": 1, "min_isolation": "plain", "scratch_dir": None, "options": {}},
    )
    assert default_place("p", tmp_path, {"a": 1})[1]["scratch_dir"] == str(tmp_path)
    assert default_place("p", tmp_path, {"a": 1})[1]["options"] == {"a": 1}


def test_settings_are_compared_as_the_journal_keeps_them(journal, tmp_path):
    settings = {**SETTINGS, "scratch_dir": tmp_path}
    journal.beat(DEAD)
    journal.intend(JournalHost("h1", DEAD.tag(), "fakes:Place", settings, "key", "intent"))
    journal.running("h1", address="a", slots=1, isolation="plain")
    assert claim_running(journal, ME, provider="fakes:Place", settings=settings, spec_key="key", limit=4) == ["h1"]


class TestWhichPlacesAreAsked:
    @pytest.fixture
    def asked(self, monkeypatch):
        """(provider, settings) of each place, in the order of listing; nothing is there."""
        asked = []

        def load(name, settings, state_dir, me):
            asked.append((name, settings))
            return FakePlace()

        monkeypatch.setattr("sandbox_pool.journal.gc._load", load)
        return asked

    @pytest.mark.parametrize(("platform", "places"), [("linux", ["local"]), ("darwin", [])])
    async def test_this_machine_where_it_can_have_hosts(self, journal, asked, tmp_path, monkeypatch, platform, places):
        monkeypatch.setattr("sandbox_pool.journal.gc.sys", SimpleNamespace(platform=platform))
        await collect_orphans(journal, tmp_path, ME)
        assert [name for name, _ in asked] == places
        assert all(settings == default_place("local")[1] for _, settings in asked)

    async def test_each_that_the_journal_knows_once(self, journal, asked, tmp_path):
        other = {**SETTINGS, "slots": 2}
        for number, (provider, settings) in enumerate(
            [("one", SETTINGS), ("two", SETTINGS), ("one", SETTINGS), ("one", other)]
        ):
            journal.beat(ME)
            journal.intend(JournalHost(f"h{number}", ME.tag(), provider, settings, "key", "intent"))
        await collect_orphans(journal, tmp_path, ME)
        ours = [place for place in asked if place[0] != "local"]
        assert ours == [("one", SETTINGS), ("two", SETTINGS), ("one", other)]

    async def test_a_named_one_that_the_journal_knows_too_once(self, journal, asked, tmp_path):
        settings = {**SETTINGS, "scratch_dir": tmp_path}
        journal.beat(ME)
        journal.intend(JournalHost("h1", ME.tag(), "one", settings, "key", "intent"))
        turned = dict(reversed(settings.items()))
        await collect_orphans(journal, tmp_path, ME, places=[("one", turned)])
        assert [place for place in asked if place[0] != "local"] == [("one", turned)]

    async def test_this_machine_that_cannot_be_asked_is_a_failure(self, journal, tmp_path, monkeypatch):
        def load(*_):
            raise OSError("no scratch")

        monkeypatch.setattr("sandbox_pool.journal.gc.sys", SimpleNamespace(platform="linux"))
        monkeypatch.setattr("sandbox_pool.journal.gc._load", load)
        report = await collect_orphans(journal, tmp_path, ME)
        assert said(report) == [("*", "local", "failed", "local cannot be asked what is there: no scratch")]


async def test_an_unrecorded_host_is_destroyed_with_the_settings_of_its_place(journal, closing, tmp_path):
    run(closing, "lost")
    await collect_orphans(journal, tmp_path, ME, places=[("fakes:Place", {**SETTINGS, "slots": 5})])
    assert [(context.state_dir, context.slots) for context, _ in closing.given] == [(tmp_path, 5)] * 2


async def test_an_owner_elsewhere_whose_heart_stopped_long_ago_is_dead(journal, place, tmp_path, monkeypatch):
    far = dataclasses.replace(ME, machine="far")
    monkeypatch.setattr("sandbox_pool.journal.journal.time.time", lambda: 1.0)
    record(journal, "h1", far)
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "fakes", SimpleNamespace(Place=lambda context, options: place))
    place.owner = ME.tag()
    report = await collect_orphans(journal, tmp_path, ME)
    assert [(action.name, action.done) for action in report.actions] == [("h1", "destroyed")]
    assert far.tag() not in journal.owners()
