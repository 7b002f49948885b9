"""Hosts: started on demand, replaced when they fail, stopped when idle, and never forgotten."""

import asyncio
import dataclasses
import time

import pytest

from sandbox_pool import HostStartFailed, IsolationUnavailable, SandboxLost
from sandbox_pool.journal.journal import Journal
from sandbox_pool.journal.owner import this_process
from sandbox_pool.pool.pool import SlotPool
from support.pool_fake_host import FakePlace, FakeServer, FakeSlot
from support.pool_wait import eventually


def journal_of(pool):
    journal = Journal(pool.config.resolved_state_dir())
    try:
        return {host.name: host.state for host in journal.hosts()}
    finally:
        journal.close()


async def test_hosts_follow_demand_up_to_the_maximum(make_pool):
    place = FakePlace(slots=2)
    async with make_pool(place, max_hosts=3, max_starting=3) as pool:
        assert len(place.servers) == 1
        leases = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(6)))
        assert len(place.servers) == 3
        await asyncio.gather(*(lease.release() for lease in leases))


async def test_no_more_hosts_start_at_once_than_allowed(make_pool):
    place = FakePlace(slots=1)
    place.start_gate = asyncio.Event()
    async with make_pool(place, min_hosts=0, max_hosts=8, max_starting=2) as pool:
        tasks = [asyncio.create_task(pool.acquire(f"t{n}")) for n in range(6)]
        await eventually(lambda: place.at_once == 2)
        place.start_gate.set()
        for lease in await asyncio.gather(*tasks):
            await lease.release()
        assert place.most_at_once == 2


async def test_creates_are_paced(make_pool):
    place = FakePlace(slots=1)
    begun = time.monotonic()
    async with make_pool(place, min_hosts=0, max_hosts=3, max_starting=3, create_interval_s=0.2) as pool:
        leases = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(3)))
        await asyncio.gather(*(lease.release() for lease in leases))
    moments = sorted(moment - begun for _, moment in place.started)
    assert all(
        moment > 0.19 * number for number, moment in enumerate(moments)
    )  # later on a busy machine, never earlier


async def test_idle_hosts_go_down_to_the_minimum(make_pool):
    place = FakePlace(slots=1)
    async with make_pool(place, max_hosts=3, max_starting=3, idle_s=0.1) as pool:
        leases = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(3)))
        await asyncio.sleep(0.3)
        assert len(place.servers) == 3
        await asyncio.gather(*(lease.release() for lease in leases))
        await eventually(lambda: len(place.servers) == 1)
        await eventually(lambda: len(journal_of(pool)) == 1)
        assert pool.metrics.counts["hosts_stopped"] == 2


async def test_the_intent_is_in_the_journal_before_the_provider_is_asked(make_pool):
    place = FakePlace()
    place.start_gate = asyncio.Event()
    async with make_pool(place, min_hosts=0) as pool:
        task = asyncio.create_task(pool.acquire("t"))
        await eventually(lambda: place.started)
        assert journal_of(pool) == {place.started[0][0]: "intent"}
        place.start_gate.set()
        await (await task).release()
        assert journal_of(pool) == {place.started[0][0]: "running"}
    assert journal_of(pool) == {}


async def test_an_ambiguous_create_is_destroyed_by_its_name(make_pool):
    place = FakePlace()
    place.ambiguous = 1
    async with make_pool(place, min_hosts=0) as pool:
        lease = await pool.acquire("t", timeout_s=10)
        first = place.started[0][0]
        assert lease.host != first
        await eventually(lambda: first in place.stopped)
        await lease.release()
        assert list(place.servers) == [lease.host]


async def test_a_stop_that_fails_is_tried_again(make_pool):
    place = FakePlace()
    async with make_pool(place) as pool:
        place.stop_failures = 1
    assert place.servers == {}
    assert journal_of(pool) == {}


async def test_a_host_that_cannot_be_stopped_stays_in_the_journal(make_pool, monkeypatch):
    monkeypatch.setattr("sandbox_pool.pool.fleet.STOP_BACKOFF_S", (0.01, 0.01, 0.0))
    place = FakePlace()
    async with make_pool(place) as pool:
        place.stop_failures = 99
    assert list(journal_of(pool).values()) == ["stopping"]
    assert list(pool.status().leaked.values()) == ["the place does not answer"]


async def test_a_host_that_could_not_be_stopped_is_tried_again_when_the_pool_closes(make_pool, monkeypatch):
    monkeypatch.setattr("sandbox_pool.pool.fleet.STOP_BACKOFF_S", (0.0, 0.0))
    place = FakePlace()
    async with make_pool(place) as pool:
        place.stop_failures = 2
        (host,) = pool._fleet.hosts.values()
        pool._fleet.lose(host, "cut off")
        await eventually(lambda: pool.status().leaked and place.stop_failures == 0)
    assert pool.status().leaked == {}
    assert journal_of(pool) == {}


async def test_starting_the_pool_fails_when_no_host_can_be_started(make_pool):
    place = FakePlace()
    place.failures = [OSError("no quota")] * 5
    with pytest.raises(HostStartFailed, match="no quota"):
        async with make_pool(place, start_attempts=1):
            pass


async def test_those_who_wait_are_told_after_so_many_failures_in_a_row(make_pool, monkeypatch):
    monkeypatch.setattr("sandbox_pool.pool.fleet.BACKOFF_S", (0.01,))
    place = FakePlace()
    place.failures = [OSError("no quota")] * 3
    async with make_pool(place, min_hosts=0, start_attempts=3) as pool:
        with pytest.raises(HostStartFailed, match="no quota"):
            await pool.acquire("t", timeout_s=30)
        assert len(place.started) == 3
        await (await pool.acquire("later", timeout_s=10)).release()


async def test_a_host_that_does_not_come_up_in_time_is_given_up(make_pool):
    place = FakePlace()
    place.start_gate = asyncio.Event()
    with pytest.raises(HostStartFailed, match=r"not ready after 0\.1 s"):
        async with make_pool(place, start_timeout_s=0.1, start_attempts=1):
            pass
    assert len(place.stopped) == 1


async def test_too_little_isolation_is_refused_at_once(make_pool):
    place = FakePlace(isolation="landlock")
    with pytest.raises(IsolationUnavailable, match="min_isolation is 'namespaces'"):
        async with make_pool(place, min_isolation="namespaces"):
            pass
    assert len(place.started) == 1
    assert place.servers == {}


async def test_less_than_full_isolation_is_said_loudly(make_pool, caplog, monkeypatch):
    monkeypatch.setattr("sandbox_pool.config._warned", set())
    async with make_pool(FakePlace(isolation="uid", missing=("memory",))) as pool:
        assert pool.status().isolation == "uid"
    assert "isolated by 'uid' only: a test says so" in caplog.text
    assert "not enforceable here: memory" in caplog.text


async def test_leases_of_a_lost_host_are_lost_and_the_host_is_replaced(make_pool):
    place = FakePlace(slots=2)
    async with make_pool(place) as pool:
        lease = await pool.acquire("t")
        first = place.server
        first.crash()
        again = await pool.acquire("next", timeout_s=10)
        assert again.host != first.name
        await lease.release()
        await again.release()
        await eventually(lambda: first.name in place.stopped)
        counts = pool.metrics.counts
        assert (counts["lost_hosts"], counts["lost_leases"]) == (1, 1)


async def test_a_slot_that_is_not_clean_is_never_leased_again_and_its_host_replaced(make_pool, caplog):
    place = FakePlace(slots=2)
    async with make_pool(place) as pool:
        first = place.server
        stays = await pool.acquire("stays")
        dirty = await pool.acquire("dirty")
        first.dirty = ("a process is left",)
        await dirty.release()
        fresh = await pool.acquire("fresh", timeout_s=10)
        assert fresh.host != first.name
        assert first.name in place.servers, "a lease on the draining host still runs"
        first.dirty = ()
        await stays.release()
        await eventually(lambda: first.name in place.stopped)
        await fresh.release()
        assert pool.metrics.counts["quarantines"] == 1
    assert "a process is left" in caplog.text


async def test_a_reset_that_hangs_quarantines_the_slot(make_pool):
    place = FakePlace(slots=1)
    async with make_pool(place, reset_timeout_s=0.1) as pool:
        first = place.server
        lease = await pool.acquire("t")
        first.hold("release")
        await lease.release()
        again = await pool.acquire("next", timeout_s=10)
        assert again.host != first.name
        await again.release()


async def test_a_health_blip_never_touches_a_lease(make_pool):
    place = FakePlace(slots=2)
    async with make_pool(place, health_interval_s=0.02, health_failures=2, max_hosts=1) as pool:
        lease = await pool.acquire("t")
        place.server.errors["health"] = SandboxLost("blip")
        await eventually(lambda: pool.status().hosts[0].unhealthy)
        assert pool.status().hosts[0].leased == {lease.slot: "t"}
        del place.server.errors["health"]
        await eventually(lambda: not pool.status().hosts[0].unhealthy)
        assert place.server.slots[lease.slot].state == "leased"
        await lease.release()
        assert len(place.started) == 1


async def test_an_unhealthy_host_gets_no_new_leases_and_is_replaced_when_nobody_uses_it(make_pool):
    place = FakePlace(slots=1)
    async with make_pool(place, health_interval_s=0.02, health_failures=2) as pool:
        first = place.server
        first.errors["health"] = SandboxLost("gone")
        await eventually(lambda: first.name in place.stopped)
        lease = await pool.acquire("t", timeout_s=10)
        assert lease.host != first.name
        await lease.release()


async def test_a_host_that_stays_silent_is_lost_in_the_end(make_pool):
    place = FakePlace(slots=1)
    async with make_pool(
        place, health_interval_s=0.02, health_timeout_s=0.02, health_failures=1, lost_after_s=0.2
    ) as pool:
        lease = await pool.acquire("t")
        first = place.server
        first.hold("health")
        await eventually(lambda: first.name in place.stopped)
        assert pool.metrics.counts["lost_leases"] == 1
        await lease.release()
        again = await pool.acquire("next", timeout_s=10)
        assert again.host != first.name
        await again.release()


async def test_a_host_near_the_end_of_its_life_gets_no_new_leases(make_pool):
    place = FakePlace(slots=1)
    place.expires_at_s = time.time() + 61.5
    async with make_pool(place, health_interval_s=0.02, max_hosts=2) as pool:
        first = place.started[0][0]
        place.expires_at_s = None
        await eventually(lambda: first in place.stopped)
        lease = await pool.acquire("t", timeout_s=10)
        assert lease.host != first
        await lease.release()


async def test_slots_that_a_dead_pool_left_leased_are_reset_before_use(make_pool):
    place = FakePlace(slots=2)
    original = place.start

    async def start_found(name, spec):
        host = await original(name, spec)
        if len(place.started) == 1:
            leased = FakeSlot("leased", 7, "dead task")
            place.servers[name] = FakeServer(name, [leased, FakeSlot()], place.info, epochs=7)
        return host

    place.start = start_found
    async with make_pool(place) as pool:
        assert ("release", 0) in place.server.calls
        assert pool.status().hosts[0].free == 2


async def test_a_pool_starts_once(make_pool):
    async with make_pool() as pool:
        with pytest.raises(Exception, match="only once"):
            await pool.start()


async def test_a_pool_that_was_never_started_closes_quietly(tmp_path):
    from sandbox_pool import PoolConfig

    pool = SlotPool(PoolConfig(state_dir=tmp_path), provider=FakePlace())
    await pool.close()
    assert pool.closed


async def test_a_new_pool_takes_over_the_running_hosts_of_a_dead_one(make_pool, tmp_path, monkeypatch):
    place = FakePlace(slots=2)
    place.adopts = True
    dead = dataclasses.replace(this_process(), start_ticks=1)
    monkeypatch.setattr("sandbox_pool.pool.pool.this_process", lambda: dead)
    async with make_pool(place) as first:
        await first.acquire("task of the dead")
        (name,) = place.servers
        monkeypatch.setattr("sandbox_pool.pool.pool.this_process", this_process)
        async with make_pool(place) as second:
            assert [host.name for host in second.status().hosts] == [name]
            assert second.status().hosts[0].free == 2
            assert second.metrics.counts["hosts_adopted"] == 1
            (host,) = second._fleet.hosts.values()
            assert (host.key, host.spec, host.connect) == ("all", second.config.spec, place.connect)
            assert len(place.started) == 2, "found by its name, not created"
            assert len(place.servers) == 1
            await (await second.acquire("t")).release()


async def test_a_host_that_was_started_otherwise_is_not_taken_over(make_pool, monkeypatch):
    place = FakePlace(slots=2)
    place.adopts = True
    dead = dataclasses.replace(this_process(), start_ticks=1)
    monkeypatch.setattr("sandbox_pool.pool.pool.this_process", lambda: dead)
    async with make_pool(place):
        (name,) = place.servers
        monkeypatch.setattr("sandbox_pool.pool.pool.this_process", this_process)
        async with make_pool(place, min_isolation="landlock") as second:
            assert name not in [host.name for host in second.status().hosts]


async def test_who_loses_a_host_before_anything_ran_keeps_the_first_place_in_line(make_pool):
    place = FakePlace(slots=1)
    order = []

    async def take(pool, name):
        lease = await pool.acquire(name, timeout_s=30)
        order.append(name)
        await lease.release()

    async with make_pool(place, max_hosts=1) as pool:
        server = place.server
        held = server.hold("lease")
        first = asyncio.create_task(take(pool, "first"))
        await eventually(lambda: ("lease", 0, "first", None) in server.calls)
        second = asyncio.create_task(take(pool, "second"))
        await eventually(lambda: pool.status().waiting == 1)
        server.crash()
        held.set()
        await asyncio.gather(first, second)
    assert order == ["first", "second"]
