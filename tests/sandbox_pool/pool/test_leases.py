"""Leases: who gets a slot, in what order, and that none is ever lost."""

import asyncio
import random
import time

import pytest

from sandbox_pool import AcquireTimeout, PoolClosed, SandboxError, SandboxLost, SandboxSpec, ScratchFull
from sandbox_pool.errors import HostStartFailed
from support.pool_fake_host import FakePlace
from support.pool_wait import eventually


def free_slots(pool):
    return sum(host.free for host in pool.status().hosts)


async def cancelled_while_leasing(pool):
    """The gate behind which the server still leases the slot of a task that was cancelled."""
    gate = pool.place.server.hold("lease")
    task = asyncio.create_task(pool.acquire("t"))
    await eventually(lambda: ("lease", 0, "t", None) in pool.place.server.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return gate


async def test_a_lease_is_a_context_and_an_awaitable(make_pool):
    async with make_pool() as pool:
        async with pool.lease("one") as box:
            assert pool.status().hosts[0].leased == {box.slot: "one"}
        lease = await pool.lease("two")
        assert list(pool.status().hosts[0].leased.values()) == ["two"]
        await lease.release()
        assert free_slots(pool) == 2


async def test_a_slot_is_in_one_pair_of_hands_only(make_pool):
    async with make_pool(FakePlace(slots=4)) as pool:
        leases = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
        assert len({lease.slot for lease in leases}) == 4
        with pytest.raises(AcquireTimeout):
            await pool.acquire("fifth", timeout_s=0.05)


async def test_first_come_first_served(make_pool):
    order = []

    async def work(pool, n):
        async with pool.lease(f"t{n}"):
            order.append(n)
            await asyncio.sleep(0)

    async with make_pool(FakePlace(slots=1)) as pool:
        await asyncio.gather(*(work(pool, n) for n in range(20)))
    assert order == list(range(20))


async def test_a_lease_whose_body_raises_is_given_back(make_pool):
    async with make_pool(FakePlace(slots=1)) as pool:
        with pytest.raises(KeyError):
            async with pool.lease("t"):
                raise KeyError
        async with pool.lease("next", timeout_s=5):
            pass


async def test_the_timeout_says_who_holds_the_slots(make_pool):
    async with make_pool(FakePlace(slots=2)) as pool:
        async with pool.lease("alice"), pool.lease("bob"):
            with pytest.raises(AcquireTimeout, match=r"carol got no slot in .*2 of 2 slots are leased \(alice .*bob"):
                await pool.acquire("carol", timeout_s=0.05)
        assert pool.metrics.counts["acquire_timeouts"] == 1


async def test_the_timeout_says_that_hosts_are_starting(make_pool):
    place = FakePlace()
    place.start_gate = asyncio.Event()
    async with make_pool(place, min_hosts=0) as pool:
        first = asyncio.create_task(pool.acquire("first"))
        await eventually(lambda: place.started)
        with pytest.raises(AcquireTimeout, match=r"1 host\(s\) starting"):
            await pool.acquire("t", timeout_s=0.05)
        place.start_gate.set()
        await (await first).release()


async def test_the_timeout_tells_the_last_start_error(make_pool):
    place = FakePlace()
    place.failures = [OSError("no quota left")] * 100
    async with make_pool(place, min_hosts=0) as pool:
        first = asyncio.create_task(pool.acquire("first"))
        await eventually(lambda: pool.metrics.counts["start_failures"])
        with pytest.raises(AcquireTimeout, match="no quota left"):
            await pool.acquire("t", timeout_s=0.05)
        first.cancel()


async def test_a_waiter_that_gave_up_does_not_take_the_next_slot(make_pool):
    async with make_pool(FakePlace(slots=1)) as pool:
        held = await pool.acquire("holder")
        quitter = asyncio.create_task(pool.acquire("quitter"))
        stayer = asyncio.create_task(pool.acquire("stayer"))
        await eventually(lambda: pool.status().waiting == 2)
        quitter.cancel()
        await held.release()
        assert (await asyncio.wait_for(stayer, 5)).task_id == "stayer"
        await (await stayer).release()


async def test_cancelled_while_the_server_leases_the_slot_comes_back(make_pool):
    async with make_pool(FakePlace(slots=1)) as pool:
        gate = await cancelled_while_leasing(pool)
        assert free_slots(pool) == 0
        gate.set()
        await eventually(lambda: free_slots(pool) == 1)
        assert ("release", 0) in pool.place.server.calls


async def test_a_lease_that_fails_late_fails_for_nobody(make_pool):
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
    async with make_pool(FakePlace(slots=1)) as pool:
        gate = await cancelled_while_leasing(pool)
        pool.place.server.errors["lease"] = SandboxError("no such image")
        gate.set()
        await eventually(lambda: free_slots(pool) == 1)
    assert complaints == []


async def test_a_slot_that_was_just_handed_to_one_who_is_cancelled_goes_to_the_next(make_pool):
    async with make_pool(FakePlace(slots=1)) as pool:
        held = await pool.acquire("holder")
        first = asyncio.create_task(pool.acquire("first"))
        await eventually(lambda: pool.status().waiting == 1)
        (waiter,) = pool._dispatcher.queue.waiting()
        second = asyncio.create_task(pool.acquire("second"))
        await eventually(lambda: pool.status().waiting == 2)
        _, next_in_line = pool._dispatcher.queue.waiting()
        waiter.granted.add_done_callback(lambda _: first.cancel())
        await held.release()
        assert waiter.granted.done()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert next_in_line.granted.done(), "at once, not when the fleet is looked at the next time"
        await (await second).release()


async def test_cancelled_during_release_the_reset_still_happens(make_pool):
    async with make_pool(FakePlace(slots=1)) as pool:
        lease = await pool.acquire("t")
        gate = pool.place.server.hold("release")
        task = asyncio.create_task(lease.release())
        await eventually(lambda: ("release", 0) in pool.place.server.calls)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await eventually(lambda: free_slots(pool) == 1)


async def test_no_slot_is_lost_however_leases_are_cancelled(make_pool):
    rng = random.Random(7)
    place = FakePlace(slots=3)

    async def work(pool, n):
        async with pool.lease(f"t{n}"):
            await asyncio.sleep(rng.random() * 0.01)

    async with make_pool(place) as pool:
        for _ in range(30):
            tasks = [asyncio.create_task(work(pool, n)) for n in range(8)]
            await asyncio.sleep(rng.random() * 0.01)
            for task in rng.sample(tasks, 4):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await eventually(lambda: free_slots(pool) == 3)
        assert all(slot.state == "free" for slot in place.server.slots)


async def test_releasing_twice_is_harmless(make_pool):
    async with make_pool(FakePlace(slots=1)) as pool:
        first = await pool.acquire("first")
        await first.release()
        second = await pool.acquire("second")
        await first.release()
        assert pool.status().hosts[0].leased == {0: "second"}
        await second.release()


async def test_a_lease_that_ran_out_is_taken_back(make_pool):
    async with make_pool(FakePlace(slots=1)) as pool:
        lease = await pool.acquire("slow", ttl_s=0.05)
        async with pool.lease("next", timeout_s=5):
            pass
        await lease.release()
        assert pool.metrics.counts["expired_leases"] == 1
        assert free_slots(pool) == 1


async def test_a_lease_given_back_in_time_does_not_run_out(make_pool, caplog):
    async with make_pool(FakePlace(slots=1)) as pool:
        await (await pool.acquire("quick", ttl_s=0.05)).release()
        async with pool.lease("longer", ttl_s=0.1) as box:  # its limit comes after the other's
            await eventually(lambda: pool.metrics.counts["expired_leases"])
            assert box.task_id == "longer"
    assert [record.args[0] for record in caplog.records if "ran out" in record.message] == ["longer"]


async def test_the_time_limit_of_a_lease_that_ended_does_not_hit_the_next(make_pool):
    async with make_pool(FakePlace(slots=1), lease_ttl_s=0.1) as pool:
        await (await pool.acquire("first")).release()
        async with pool.lease("second", ttl_s=60):
            await asyncio.sleep(0.2)
            assert pool.status().hosts[0].leased == {0: "second"}


async def test_an_error_of_the_server_reaches_the_caller_and_the_slot_comes_back(make_pool):
    async with make_pool(FakePlace(slots=1)) as pool:
        pool.place.server.errors["lease"] = SandboxError("no such image")
        with pytest.raises(SandboxError, match="no such image"):
            await pool.acquire("t")
        del pool.place.server.errors["lease"]
        await (await pool.acquire("again", timeout_s=5)).release()


async def test_a_host_that_dies_while_leasing_is_replaced_and_the_waiter_served(make_pool):
    place = FakePlace(slots=1)
    async with make_pool(place, max_hosts=2) as pool:
        first = place.server
        gate = first.hold("lease")
        task = asyncio.create_task(pool.acquire("t"))
        await eventually(lambda: len(first.calls) > 1 and first.calls[-1][0] == "lease")
        first.crash()
        gate.set()
        lease = await asyncio.wait_for(task, 10)
        assert lease.host != first.name
        await lease.release()


async def test_after_close_there_are_no_leases(make_pool):
    async with make_pool() as pool:
        held = await pool.acquire("held")
    with pytest.raises(PoolClosed):
        await pool.acquire("late")
    await held.release()
    assert pool.place.servers == {}


async def test_closing_tells_those_who_wait(make_pool):
    async with make_pool(FakePlace(slots=1)) as pool:
        await pool.acquire("holder")
        waiter = asyncio.create_task(pool.acquire("waiter"))
        await eventually(lambda: pool.status().waiting == 1)
        await pool.close()
        with pytest.raises(PoolClosed):
            await waiter


async def test_a_full_scratch_space_is_a_clear_error(make_pool, caplog):
    async with make_pool(health_interval_s=0.02) as pool:
        pool.place.server.scratch_free_mb = 500
        await eventually(lambda: "filling up: 500 MB free" in caplog.text)
        pool.place.server.scratch_free_mb = 3
        await eventually(lambda: pool.status().hosts[0].unhealthy)
        with pytest.raises(ScratchFull, match="3 MB free"):
            await pool.acquire("t", timeout_s=5)
        pool.place.server.scratch_free_mb = 9000
        await (await asyncio.wait_for(_retry(pool), 5)).release()


async def test_the_warning_of_a_filling_disk_is_not_repeated_with_every_check(make_pool, caplog):
    async with make_pool(health_interval_s=0.01) as pool:
        for free_mb, said in ((500, 1), (400, 1), (240, 2), (9000, 2), (500, 3)):
            pool.place.server.scratch_free_mb = free_mb
            await eventually(lambda left=free_mb: pool.status().hosts[0].scratch_free_mb == left)
            assert caplog.text.count("filling up") == said, free_mb


async def _retry(pool):
    while True:
        try:
            return await pool.acquire("t", timeout_s=1)
        except ScratchFull:
            await asyncio.sleep(0.02)


async def test_reuse_is_counted(make_pool):
    began_s = time.monotonic()
    async with make_pool(FakePlace(slots=1)) as pool:
        for _ in range(3):
            async with pool.lease("t"):
                pass
        counts = pool.metrics.counts
        assert (counts["leases"], counts["reuses"]) == (3, 2)
        assert pool.metrics.summary()["acquire_ms"]["count"] == 3
        resets = pool.metrics.summary()["reset_ms"]
        assert (resets["count"], 0 < resets["p50"] < (time.monotonic() - began_s) * 1000) == (3, True)


async def test_a_spec_with_hosts_of_its_own_waits_only_for_those(make_pool):
    place = FakePlace(slots=1, shared=False)
    big, small = SandboxSpec(memory_mb=4096), SandboxSpec(memory_mb=64)
    async with make_pool(place, min_hosts=0, max_hosts=2) as pool:
        one, other = await pool.acquire("big", big), await pool.acquire("small", small)
        assert one.host != other.host
        with pytest.raises(AcquireTimeout):
            await pool.acquire("more", big, timeout_s=0.05)


async def test_hosts_that_cannot_be_started_fail_only_those_who_wait_for_them(make_pool):
    big, small = SandboxSpec(memory_mb=4096), SandboxSpec(memory_mb=64)

    class NoLargeMachine(FakePlace):
        async def start(self, name, spec):
            if spec == big:
                raise HostStartFailed("no machine is so large")
            return await super().start(name, spec)

    place = NoLargeMachine(slots=1, shared=False)
    async with make_pool(place, min_hosts=0, max_hosts=3, start_attempts=1) as pool:
        held = await pool.acquire("held", small)
        place.start_gate = asyncio.Event()  # another small host takes its time
        waiting = asyncio.create_task(pool.acquire("waiting", small))
        await eventually(lambda: pool.status().waiting == 1)
        with pytest.raises(HostStartFailed, match="so large"):
            await pool.acquire("large", big)
        await held.release()
        await (await waiting).release()


async def test_a_lost_snapshot_is_an_error_and_not_an_empty_slot(make_pool):
    async with make_pool() as pool:
        with pytest.raises(SandboxError, match="no snapshot"):
            await pool.lease_from("unknown", "t")
        lease = await pool.acquire("t")
        snapshot = pool.remember_snapshot("snap", lease._grant)
        assert await pool.has_snapshot(snapshot)
        pool.place.server.crash()
        with pytest.raises(SandboxLost, match="went away"):
            await pool.lease_from(snapshot, "t")
        assert not await pool.has_snapshot(snapshot)


async def test_a_snapshot_is_copied_to_another_host_when_its_own_is_full(make_pool):
    place = FakePlace(slots=1)
    async with make_pool(place, min_hosts=2, max_hosts=2) as pool:
        await eventually(lambda: len(pool.status().hosts) == 2 and free_slots(pool) == 2)
        lease = await pool.acquire("maker")
        place.servers[lease.host].snapshots["snap"] = b"files"
        snapshot = pool.remember_snapshot("snap", lease._grant)
        copy = await pool.lease_from(snapshot, "fork")
        assert copy.host != lease.host
        (imported,) = place.servers[copy.host].snapshots
        assert place.servers[copy.host].snapshots[imported] == b"files"
        assert ("lease", 0, "fork", imported) in place.servers[copy.host].calls
        await pool.drop_snapshot(snapshot)
        assert all(not server.snapshots for server in place.servers.values())
