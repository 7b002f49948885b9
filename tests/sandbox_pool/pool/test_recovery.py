"""What becomes of a slot, a lease or a host when a call on it went wrong, and what is said of it."""

import asyncio
import contextlib

import pytest

from sandbox_pool import AcquireTimeout, HostStartFailed, PoolClosed, SandboxError, SandboxLost, StaleLease
from sandbox_pool.errors import PlaceUnreachable, ScratchFull, StateError
from sandbox_pool.journal.journal import Journal
from support.pool_fake_host import FakePlace
from support.pool_wait import eventually


def said(caplog):
    return [record.getMessage() for record in caplog.records]


def reasons(pool):
    """Why each host in the journal is being stopped."""
    journal = Journal(pool.config.resolved_state_dir())
    try:
        return [host.detail for host in journal.hosts()]
    finally:
        journal.close()


def only_host(pool):
    (host,) = pool._fleet.hosts.values()
    return host


async def refused(pool, error=SandboxError, **options):
    with pytest.raises(error):
        await pool.acquire("refused", timeout_s=10, **options)


class TestASlotWhoseLeaseFailed:
    async def test_comes_back_when_it_was_leased_all_the_same(self, make_pool):
        place = FakePlace(slots=2)
        async with make_pool(place) as pool:
            server = place.server
            slot = server.slots[only_host(pool).free[0]]
            slot.state, slot.epoch = "leased", 41
            await refused(pool)
            assert [call for call in server.calls if call[0] == "release"] == [("release", server.slots.index(slot))]
            assert sorted(only_host(pool).free) == [0, 1]
            leases = [await pool.acquire("later", timeout_s=10) for _ in range(2)]
            for lease in leases:
                await lease.release()
            assert pool.metrics.counts["quarantines"] == 0

    async def test_comes_back_when_it_is_free(self, make_pool):
        place = FakePlace(slots=1)
        async with make_pool(place) as pool:
            place.server.errors["lease"] = SandboxError("not now")
            await refused(pool)
            assert only_host(pool).free == [0]
            assert not [call for call in place.server.calls if call[0] == "release"]

    @pytest.mark.parametrize("state", ["resetting", "quarantined"])
    async def test_is_given_up_when_it_is_neither(self, make_pool, caplog, state):
        place = FakePlace(slots=1)
        async with make_pool(place) as pool:
            name = place.server.name
            place.server.slots[0].state = state
            await refused(pool)
            await eventually(lambda: name in place.stopped)
        assert f"{name}: slot 0 is {state}; the host will be replaced" in said(caplog)

    async def test_is_given_up_when_the_server_does_not_know_it(self, make_pool, caplog):
        place = FakePlace(slots=1)
        async with make_pool(place) as pool:
            server = place.server
            server.errors["lease"] = SandboxError("no such slot")
            server.slots.clear()
            await refused(pool)
            await eventually(lambda: server.name in place.stopped)
        assert f"{server.name}: slot 0 is missing; the host will be replaced" in said(caplog)

    async def test_is_given_up_when_the_server_cannot_tell(self, make_pool, caplog):
        place = FakePlace(slots=1)
        async with make_pool(place) as pool:
            server = place.server
            server.errors.update(lease=SandboxError("not now"), slots=SandboxError("out of order"))
            await refused(pool)
            await eventually(lambda: server.name in place.stopped)
        expected = f"{server.name}: the state of slot 0 is unknown: out of order; the host will be replaced"
        assert expected in said(caplog)

    async def test_is_given_up_when_the_server_does_not_answer(self, make_pool, caplog):
        place = FakePlace(slots=1)
        async with make_pool(place, reset_timeout_s=0.05) as pool:
            server = place.server
            server.errors["lease"] = SandboxError("not now")
            server.hold("slots")
            await asyncio.wait_for(refused(pool), 20)
            await eventually(lambda: server.name in place.stopped)
        expected = f"{server.name}: the state of slot 0 is unknown: no answer; the host will be replaced"
        assert expected in said(caplog)

    async def test_an_answer_about_one_lease_is_not_the_end_of_its_host(self, make_pool):
        place = FakePlace(slots=1)
        async with make_pool(place) as pool:
            place.server.errors["lease"] = SandboxLost("that slot broke")
            await refused(pool, SandboxLost)
            assert pool.metrics.counts["lost_hosts"] == 0
            assert only_host(pool).free == [0]

    async def test_a_dead_connection_is(self, make_pool, caplog):
        place = FakePlace(slots=1)
        async with make_pool(place) as pool:
            server = place.server
            server.errors["lease"] = SandboxLost("cut in the middle")
            only_host(pool).client.closed = True
            lease = await pool.acquire("t", timeout_s=10)
            assert lease.host != server.name
            assert ("slots",) not in server.calls[1:], "a host that is gone is not asked about its slots"
            await lease.release()
        assert f"host {server.name} lost: cut in the middle" in said(caplog)

    async def test_a_stale_lease_is_no_sign_of_a_dead_host(self, make_pool):
        place = FakePlace(slots=1)
        async with make_pool(place) as pool:
            place.server.errors["lease"] = StaleLease("of another epoch")
            only_host(pool).client.closed = True
            await refused(pool, StaleLease)
            assert pool.metrics.counts["lost_hosts"] == 0


class TestAReset:
    async def test_that_is_late_is_said_with_its_time(self, make_pool, caplog):
        place = FakePlace(slots=1)
        async with make_pool(place, reset_timeout_s=0.05) as pool:
            server = place.server
            lease = await pool.acquire("t")
            server.hold("release")
            await lease.release()
            await eventually(lambda: server.name in place.stopped)
        assert f"{server.name}: slot 0 was not reset after 0.05 s; the host will be replaced" in said(caplog)

    async def test_that_is_refused_is_said_with_its_reason(self, make_pool, caplog):
        place = FakePlace(slots=1)
        async with make_pool(place) as pool:
            server = place.server
            lease = await pool.acquire("t")
            server.errors["release"] = SandboxError("no")
            await lease.release()
            await eventually(lambda: server.name in place.stopped)
        assert f"{server.name}: slot 0 could not be reset: no; the host will be replaced" in said(caplog)

    async def test_that_leaves_something_says_all_of_it(self, make_pool, caplog):
        place = FakePlace(slots=1)
        async with make_pool(place) as pool:
            server = place.server
            lease = await pool.acquire("t")
            server.dirty = ("a process", "a file")
            await lease.release()
            await eventually(lambda: server.name in place.stopped)
            assert pool.metrics.summary()["reset_ms"]["count"] == 1
        assert f"{server.name}: slot 0 is not clean: a process; a file; the host will be replaced" in said(caplog)


class TestAnIdleLease:
    """One look at a lease whose time without use is limited; what it decides, without waiting for it."""

    @pytest.fixture
    async def look(self, make_pool, monkeypatch):
        async with make_pool(FakePlace(slots=2), lease_idle_s=1000.0) as pool:
            lease = await pool.acquire("t")
            dispatcher, again = pool._dispatcher, []
            timers = dispatcher._idle_checks[lease._grant]
            monkeypatch.setattr(dispatcher, "_check_idle_in", lambda left_s, grant: again.append((left_s, grant)))

            async def look(idle_s, slot=lease.slot):
                pool.place.server.slots[slot].idle_s = idle_s
                before = dispatcher._metrics.counts["expired_leases"]
                await dispatcher._end_when_idle(lease._grant, 10.0)
                taken = dispatcher._metrics.counts["expired_leases"] - before
                assert all(grant is lease._grant for _, grant in again)
                return taken, [left_s for left_s, _ in again]

            look.pool, look.lease, look.timers = pool, lease, timers
            yield look
            await lease.release()

    async def test_is_looked_at_again_when_its_time_would_be_up(self, look):
        assert await look(4.0) == (0, [6.0])
        assert await look(9.5) == (0, [6.0, 0.5])

    async def test_is_taken_back_when_its_time_is_up(self, look, caplog):
        assert await look(10.0) == (1, [])
        await eventually(lambda: not only_host(look.pool).grants)
        host = only_host(look.pool).name
        assert f"the lease of t on {host} slot {look.lease.slot} ran out" in said(caplog)

    async def test_is_left_while_something_is_asked_of_it(self, look):
        assert await look(None) == (0, [10.0])

    async def test_is_not_judged_by_another_slot(self, look):
        assert await look(100.0, slot=1 - look.lease.slot) == (0, [10.0])

    async def test_is_left_when_its_host_does_not_answer(self, look):
        look.pool.place.server.errors["slots"] = SandboxError("no answer")
        assert await look(100.0) == (0, [10.0])

    async def test_is_left_when_nobody_speaks_to_its_host(self, look):
        host = only_host(look.pool)
        client, host.client = host.client, None
        assert await look(100.0) == (0, [10.0])
        host.client = client

    async def test_that_was_given_back_meanwhile_is_not_taken_from_the_next(self, look):
        await look.lease.release()
        assert await look(100.0) == (0, [])

    async def test_is_looked_at_after_its_time(self, look):
        left_s = look.timers.when() - asyncio.get_running_loop().time()
        assert 900 < left_s <= 1000


async def test_a_lease_that_nobody_uses_is_taken_back(make_pool):
    place = FakePlace(slots=1)
    async with make_pool(place, lease_idle_s=0.05) as pool:
        await pool.acquire("forgotten")
        place.server.slots[0].idle_s = 1.0
        await (await pool.acquire("next", timeout_s=30)).release()
        assert pool.metrics.counts["expired_leases"] == 1


class ReportingPlace(FakePlace):
    """A place that says when a host is gone."""

    def on_host_lost(self, callback):
        self.lost = callback


class TestALostHost:
    async def test_that_its_provider_reports_is_replaced(self, make_pool, caplog):
        place = ReportingPlace(slots=1)
        async with make_pool(place) as pool:
            lease = await pool.acquire("t")
            place.lost("nobody", "of another pool")
            assert pool.metrics.counts["lost_hosts"] == 0
            place.lost(lease.host, "evicted")
            again = await pool.acquire("next", timeout_s=10)
            assert again.host != lease.host
            await again.release()
        assert f"host {lease.host} lost: evicted" in said(caplog)

    async def test_is_lost_once_and_not_asked_to_end(self, make_pool):
        place = FakePlace(slots=2)
        async with make_pool(place) as pool:
            server, host = place.server, only_host(pool)
            leases = [await pool.acquire(f"t{n}") for n in range(2)]
            pool._fleet.lose(host, "cut off")
            pool._fleet.lose(host, "cut off")
            await eventually(lambda: server.name in place.stopped)
            counts = pool.metrics.counts
            assert (counts["lost_hosts"], counts["lost_leases"]) == (1, 2)
            assert ("shutdown",) not in server.calls
            for lease in leases:
                await lease.release()

    async def test_says_why_as_long_as_it_is_in_the_journal(self, make_pool, monkeypatch):
        monkeypatch.setattr("sandbox_pool.pool.fleet.STOP_BACKOFF_S", (0.0, 0.0, 0.0))
        place = FakePlace()
        async with make_pool(place, max_hosts=1, min_hosts=0) as pool:
            await (await pool.acquire("t")).release()
            place.stop_failures = 99
            pool._fleet.lose(only_host(pool), "cut off")
            await eventually(lambda: pool._fleet.leaked)
            assert reasons(pool) == ["lost: cut off"]
            place.stop_failures = 0

    async def test_one_that_ends_in_good_order_is_asked_to(self, make_pool):
        place = FakePlace()
        async with make_pool(place) as pool:
            server = place.server
        assert ("shutdown",) in server.calls
        assert pool.metrics.counts["lost_hosts"] == 0


class TestAStartThatFails:
    async def test_is_said_with_its_number_and_reason(self, make_pool, caplog, monkeypatch):
        monkeypatch.setattr("sandbox_pool.pool.fleet.BACKOFF_S", (0.01,))
        place = FakePlace()
        place.failures = [OSError("no quota"), HostStartFailed("still none")]
        async with make_pool(place, min_hosts=0, start_attempts=3) as pool:
            await (await pool.acquire("t", timeout_s=30)).release()
            first, second = [name for name, _ in place.started[:2]]
            assert pool.metrics.counts["start_failures"] == 2
            assert pool.metrics.counts["hosts_started"] == 1
        assert f"host {first} did not start (1 in a row): OSError: no quota" in said(caplog)
        assert f"host {second} did not start (2 in a row): still none" in said(caplog)

    async def test_may_have_made_the_host_so_it_is_destroyed(self, make_pool):
        place = FakePlace()
        place.failures = [OSError("cut")]
        async with make_pool(place, min_hosts=0) as pool:
            await (await pool.acquire("t", timeout_s=30)).release()
            await eventually(lambda: place.started[0][0] in place.stopped)

    async def test_that_never_reached_the_place_made_nothing(self, make_pool):
        place = FakePlace()
        place.failures = [PlaceUnreachable("no route")]
        async with make_pool(place, min_hosts=0) as pool:
            await (await pool.acquire("t", timeout_s=30)).release()
            assert place.started[0][0] not in place.stopped
            await eventually(lambda: len(reasons(pool)) == 1)

    async def test_of_one_more_host_does_not_fail_those_who_are_served_in_turn(self, make_pool):
        place = FakePlace(slots=1)
        async with make_pool(place, max_hosts=2, start_attempts=1) as pool:
            lease = await pool.acquire("t")
            place.failures = [OSError("no quota")]
            waiting = asyncio.create_task(pool.acquire("next", timeout_s=30))
            await eventually(lambda: pool.metrics.counts["start_failures"])
            assert not waiting.done()
            await lease.release()
            await (await waiting).release()

    async def test_waits_longer_after_each(self, make_pool, monkeypatch):
        from sandbox_pool.pool.fleet import BACKOFF_S, StartFailures

        now = 100.0
        monkeypatch.setattr("sandbox_pool.pool.fleet.time.monotonic", lambda: now)
        failures = StartFailures()
        for count, pause_s in enumerate((*BACKOFF_S, BACKOFF_S[-1]), 1):
            assert failures.add("key", OSError()) == count
            now += pause_s - 0.001
            assert failures.blocked() == {"key"}
            now += 0.001
            assert failures.blocked() == frozenset()
        failures.clear("key")
        failures.clear("key")
        assert failures.add("key", OSError()) == 1


async def test_what_hosts_are_called(make_pool):
    place = FakePlace()
    async with make_pool(place):
        (name,) = place.servers
    kind, provider, key, number = name.rsplit("-", 3)
    assert (kind, provider, key) == ("hrl", "place", "all")
    assert len(number) == 10


async def test_a_host_is_given_so_long_to_confirm_that_it_is_gone(make_pool, monkeypatch, caplog):
    monkeypatch.setattr("sandbox_pool.pool.fleet.STOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr("sandbox_pool.pool.fleet.STOP_BACKOFF_S", (0.0,))

    class Hanging(FakePlace):
        hangs = True

        async def stop(self, name):
            if self.hangs:
                await asyncio.Event().wait()
            await super().stop(name)

    place = Hanging()
    async with make_pool(place) as pool:
        name = place.server.name
        pool._fleet.lose(only_host(pool), "cut off")
        await eventually(lambda: name in pool._fleet.leaked)
        assert pool.status().leaked == {name: "TimeoutError"}
        place.hangs = False
    assert f"{name} could not be stopped: TimeoutError" in said(caplog)
    assert pool.status().leaked == {}


async def test_a_host_that_does_not_answer_the_goodbye_is_stopped_all_the_same(make_pool, monkeypatch):
    monkeypatch.setattr("sandbox_pool.pool.fleet.SHUTDOWN_TIMEOUT_S", 0.05)
    place = FakePlace()
    async with make_pool(place) as pool:
        name = place.server.name

        async def never():
            await asyncio.Event().wait()

        only_host(pool).client.shutdown = never
    assert place.stopped == [name]


async def test_a_journal_that_cannot_be_written_stops_no_host_from_going(make_pool, caplog, monkeypatch):
    place = FakePlace()
    async with make_pool(place) as pool:
        name = place.server.name

        def full(*_):
            raise StateError("the disk is full")

        monkeypatch.setattr(pool._journal, "stopping", full)
        monkeypatch.setattr(pool._journal, "forget", full)
    assert place.stopped == [name]
    assert f"that {name} is being stopped cannot be recorded: the disk is full" in said(caplog)
    assert f"{name} stays in the journal: the disk is full" in said(caplog)


async def test_closing_the_pool_while_a_host_starts_leaves_nothing(make_pool):
    place = FakePlace()
    place.start_gate = asyncio.Event()
    async with make_pool(place, min_hosts=0) as pool:
        waiting = asyncio.create_task(pool.acquire("t", timeout_s=30))
        await eventually(lambda: place.started)
    with pytest.raises(PoolClosed):
        await waiting
    assert place.stopped == [place.started[0][0]]
    assert reasons(pool) == []


async def test_leasing_that_takes_too_long_is_said_and_the_slot_comes_back(make_pool):
    place = FakePlace(slots=1)
    async with make_pool(place) as pool:
        held = place.server.hold("lease")
        with pytest.raises(AcquireTimeout, match=f"^{place.server.name} did not finish leasing slot 0 to t in time$"):
            await pool.acquire("t", timeout_s=0.05)
        assert pool.metrics.counts["acquire_timeouts"] == 1
        held.set()
        del place.server.gates["lease"]
        await (await pool.acquire("next", timeout_s=10)).release()


async def test_a_wait_that_takes_too_long_is_counted(make_pool):
    place = FakePlace(slots=1)
    async with make_pool(place) as pool:
        lease = await pool.acquire("t")
        with pytest.raises(AcquireTimeout):
            await pool.acquire("next", timeout_s=0.01)
        assert pool.metrics.counts["acquire_timeouts"] == 1
        assert pool.metrics.counts["leases"] == 1
        await lease.release()


async def test_full_hosts_refuse_with_what_they_say_and_others_do_not(make_pool):
    place = FakePlace(slots=1)
    async with make_pool(place, max_hosts=2, min_hosts=2, max_starting=2) as pool:
        await eventually(lambda: len(place.servers) == 2)
        await eventually(lambda: all(host.serves and host.health for host in pool._fleet.hosts.values()))
        first, second = pool._fleet.hosts.values()
        first.scratch_full, first.unhealthy = True, "no space left"
        await (await pool.acquire("t", timeout_s=10)).release()
        second.scratch_full, second.unhealthy = True, "none here either"
        with pytest.raises(ScratchFull, match=r"^no space left$"):
            await pool.acquire("t", timeout_s=10)


async def test_load_spreads_over_hosts(make_pool):
    place = FakePlace(slots=3)
    async with make_pool(place, max_hosts=2, min_hosts=2, max_starting=2) as pool:
        await eventually(lambda: sum(host.serves for host in pool._fleet.hosts.values()) == 2)
        leases = [await pool.acquire(f"t{n}") for n in range(4)]
        assert sorted(len(host.grants) for host in pool._fleet.hosts.values()) == [2, 2]
        for lease in leases:
            await lease.release()


async def test_the_journal_knows_who_holds_what(make_pool):
    place = FakePlace(slots=1)
    async with make_pool(place) as pool:
        lease = await pool.acquire("who")

        def leases():
            journal = Journal(pool.config.resolved_state_dir())
            with contextlib.closing(journal):
                return [(entry.host, entry.slot, entry.epoch, entry.task_id) for entry in journal.leases()]

        await eventually(lambda: leases() == [(lease.host, 0, lease.epoch, "who")])
        await lease.release()
        await eventually(lambda: leases() == [])
