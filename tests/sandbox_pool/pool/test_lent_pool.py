"""A pool used from another process, on real slots. Both ends of the channel are in this test."""

import asyncio
import contextlib
import socket

import pytest

from sandbox_pool import AcquireTimeout, PoolConfig, SandboxError, SandboxSpec, SlotPool, StaleLease
from sandbox_pool.faults.faulty_provider import faulty_pool
from sandbox_pool.pool.lent_pool import HostRelay, LentPool, PoolLender
from sandbox_pool.process_channel import Channel
from support.pool_wait import eventually


@contextlib.asynccontextmanager
async def lent(pool, relay=None):
    """The pool as another process has it, and a function that ends that process."""
    lender = PoolLender(pool)
    near, far = Channel(lambda name, *words: getattr(lender, name)(*words)), Channel(None)
    ours, theirs = socket.socketpair()
    await near.open(ours)
    await far.open(theirs)
    other = LentPool(far, pool.config, relay)

    async def end():
        await far.close()
        await near.close()
        await lender.take_back()

    try:
        yield other, end
    finally:
        await other.close()
        await end()


@pytest.fixture
async def pool(tmp_path):
    config = PoolConfig(slots_per_host=2, max_hosts=1, state_dir=tmp_path / "state", scratch_dir=tmp_path / "scratch")
    async with SlotPool.from_config(config) as pool:
        yield pool


def held(pool):
    return [slot for host in pool.status().hosts for slot in host.leased]


async def test_a_lease_works_and_goes_back(pool):
    async with lent(pool) as (other, _):
        async with other.lease("t") as box:
            assert (await box.exec("echo hello")).output == "hello\n"
            assert len(held(pool)) == 1
        assert held(pool) == []
        with pytest.raises(StaleLease):
            await box.exec("echo late")
        await box.release()
        assert other.metrics.summary()["exec_ms"]["count"] == 1


async def test_both_processes_wait_in_one_line(pool):
    async with lent(pool) as (other, _), pool.lease("a"), other.lease("b"):
        with pytest.raises(AcquireTimeout):
            await pool.acquire("c", timeout_s=0.05)
        with pytest.raises(AcquireTimeout):
            async with other.lease("c", timeout_s=0.05):
                pass


async def test_snapshots_start_leases_are_copied_out_and_dropped(pool, tmp_path):
    async with lent(pool) as (other, _):
        async with other.lease("first") as box:
            await box.write_file("f", "kept")
            snapshot = await box.snapshot(workspace=True)
        async with other.lease_from(snapshot, "second") as box:
            assert await box.read_file("f") == b"kept"
        await other.download_snapshot(snapshot, tmp_path / "out")
        assert await other.has_snapshot(snapshot)
        assert (tmp_path / "out" / "f").read_text() == "kept"
        data = b"".join([chunk async for chunk in other.export_snapshot(snapshot)])
        await other.drop_snapshot(snapshot)
        assert not await other.has_snapshot(snapshot)
        with pytest.raises(SandboxError, match="there is no snapshot"):
            async with other.lease_from(snapshot, "third"):
                pass
        (tmp_path / "kept").write_bytes(data)
        file = (tmp_path / "kept").open("rb")
        (tmp_path / "kept").unlink()  # as one that was trimmed meanwhile: who has it open may use it
        name = other.add_snapshot(file, SandboxSpec())
        async with other.lease_from(name, "fourth") as box:
            assert await box.read_file("f") == b"kept"
        await other.drop_snapshot(name)
        assert file.closed

        async def chunks():
            yield data

        again = await other.import_snapshot(chunks(), "import")
        async with other.lease_from(again, "fifth") as box:
            assert await box.read_file("f") == b"kept"
        await other.drop_snapshot(again)


async def test_cancelled_while_waiting_it_leaves_no_slot(pool):
    async with lent(pool) as (other, _):
        taken = [await pool.acquire(f"t{n}") for n in range(2)]
        waiting = asyncio.create_task(other.lease("late").__aenter__())
        await eventually(lambda: pool.status().waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert pool.status().waiting == 0
        for lease in taken:
            await lease.release()
        assert held(pool) == []


async def test_what_a_process_held_at_its_end_is_taken_back(pool):
    async with lent(pool) as (other, end):
        box = await other.lease("t")
        await box.snapshot()
        waiting = [asyncio.create_task(other.lease(f"w{n}").__aenter__()) for n in range(3)]
        await eventually(lambda: pool.status().waiting == 2)
        await end()
        assert held(pool) == []
        assert pool.status().waiting == 0
        assert not any(host.snapshots for host in pool._fleet.hosts.values())
        await asyncio.gather(*waiting, return_exceptions=True)
        async with pool.lease("next", timeout_s=30) as next_box:
            assert (await next_box.exec("echo free")).output == "free\n"


async def test_hosts_whose_provider_dials_are_reached_through_its_process(tmp_path):
    config = PoolConfig(slots_per_host=2, max_hosts=1, state_dir=tmp_path / "state", scratch_dir=tmp_path / "scratch")
    async with faulty_pool(config) as (pool, provider):
        assert pool.relayed() is provider
        async with HostRelay(provider) as relay, lent(pool, relay) as (other, _):
            async with other.lease("t") as box:
                assert (await box.exec("echo through")).output == "through\n"
                await box.write_file("large", b"x" * (3 << 20))
                assert len(await box.read_file("large")) == 3 << 20
                provider.faults.cut(box.host)
                with pytest.raises(SandboxError):
                    await box.exec("echo cut")
            async with other.lease("again", timeout_s=60) as box:
                assert (await box.exec("echo again")).output == "again\n"
