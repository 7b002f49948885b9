"""`hermes_rl.testing`: each fault happens as it says, on real slots; the pool answers right or with a typed error."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import HostStartFailed, PoolConfig, SandboxError, SandboxLost, SlotPool
from hermes_rl.testing import FaultyProvider, Rates, faulty_pool, full_disk, jumped_clock
from sandbox_pool.providers.base import ProviderContext
from support.pool_leftovers import leftovers
from support.pool_wait import eventually, started


@pytest.fixture
def config(tmp_path: Path) -> Iterator[PoolConfig]:
    scratch = tmp_path / "s"
    yield PoolConfig(
        slots_per_host=2,
        max_hosts=2,
        start_attempts=3,
        state_dir=tmp_path / "state",
        scratch_dir=scratch,
        health_interval_s=0.1,
        health_timeout_s=0.4,
        health_failures=2,
        lost_after_s=1.5,
        start_timeout_s=20.0,
        scratch_min_mb=0,
        scratch_warn_mb=0,
    )
    assert leftovers(scratch, []) == {}


async def works(pool: SlotPool) -> str:
    """A slot that works; the name of its host."""
    async with pool.lease("works", timeout_s=60) as box:
        assert (await box.exec("echo hi")).output == "hi\n"
        return box.host


@pytest.mark.parametrize("fault", ["fails", "loses_answer", "twice"])
async def test_a_start_that_goes_wrong_is_made_good(config: PoolConfig, fault: Any) -> None:
    async with faulty_pool(config) as (pool, provider):
        provider.faults.on_start(fault)
        first = await works(pool)
        async with pool.lease("a"), pool.lease("b"), pool.lease("c", timeout_s=60) as box:  # a second host is needed
            assert box.host != first
        assert provider.faults.counts[f"start_{fault}"] == 1
        assert len(await provider.inner.list()) <= 2


async def test_a_start_without_an_answer_is_given_up_and_tried_again(config: PoolConfig) -> None:
    async with faulty_pool(config.model_copy(update={"start_timeout_s": 6.0})) as (pool, provider):
        provider.faults.on_start("hangs")
        async with pool.lease("a"), pool.lease("b"), pool.lease("c", timeout_s=60) as box:
            assert (await box.exec("echo hi")).output == "hi\n"
        assert provider.faults.counts["start_hangs"] == 1


async def test_a_host_that_cannot_be_started_is_an_error_that_says_so(config: PoolConfig) -> None:
    rates = Rates(start_fails=1.0)
    with pytest.raises(HostStartFailed, match="a test says so"):
        async with faulty_pool(config, rates):
            pytest.fail("no host was started")


async def test_a_frozen_host_is_lost_and_replaced_and_a_short_freeze_costs_nothing(config: PoolConfig) -> None:
    patient = config.model_copy(update={"lost_after_s": 60.0})
    async with faulty_pool(patient) as (pool, provider), pool.lease("t") as box:
        await box.exec("export KEPT=1")
        provider.faults.freeze(box.host)
        running = asyncio.create_task(box.exec("echo $KEPT"))
        await eventually(lambda: pool.status().hosts[0].unhealthy)
        assert not running.done()
        provider.faults.come_back(box.host)
        assert (await running).output == "1\n"
    async with faulty_pool(config) as (pool, provider):
        lease = await pool.acquire("t")
        provider.faults.freeze(lease.host)
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(lease.exec("echo"), 60)
        assert await works(pool) != lease.host


async def test_a_host_that_is_cut_off_is_lost_however_well_it_is(config: PoolConfig) -> None:
    async with faulty_pool(config) as (pool, provider):
        lease = await pool.acquire("t")
        running = await started(lease, "sleep 300")
        provider.faults.cut_off(lease.host)
        with pytest.raises(SandboxLost):
            await running
        assert await works(pool) != lease.host
        provider.faults.come_back(lease.host)
        with pytest.raises(SandboxError):  # the lease is over, although the host is there again
            await lease.exec("echo")


async def test_a_host_that_vanishes_is_replaced(config: PoolConfig) -> None:
    async with faulty_pool(config) as (pool, provider):
        lease = await pool.acquire("t")
        await provider.vanish(lease.host)
        with pytest.raises(SandboxLost):
            await lease.exec("echo")
        assert await works(pool) != lease.host


@pytest.mark.parametrize("fault", ["fails", "loses_answer"])
async def test_a_stop_that_goes_wrong_is_made_again(config: PoolConfig, fault: Any) -> None:
    async with faulty_pool(config) as (pool, provider):
        lease = await pool.acquire("t")
        provider.faults.on_stop(fault)
        provider.faults.cut_off(lease.host)
        await works(pool)
    assert provider.faults.counts[f"stop_{fault}"] == 1


async def exact(pool: SlotPool, number: int) -> str:
    """What a task does with a slot; any wrong byte fails the test."""
    data = os.urandom(200_000)
    async with pool.lease(f"t{number}", timeout_s=60) as box:
        for turn in range(5):
            result = await box.exec(f"echo {number} {turn}", timeout_s=20)
            assert (result.output, result.exit_code) == (f"{number} {turn}\n", 0)
        await box.write_file("f", data)
        assert await box.read_file("f") == data
    return "done"


@pytest.mark.parametrize("rates", [Rates(slow_s=0.02), Rates(cut=0.02), Rates(slow_s=0.01, cut=0.01)], ids=str)
async def test_on_slow_and_cut_lines_every_answer_is_right_or_a_typed_error(config: PoolConfig, rates: Rates) -> None:
    async with faulty_pool(config, rates, seed=5) as (pool, provider):
        results = await asyncio.gather(*(exact(pool, number) for number in range(12)), return_exceptions=True)
        provider.faults.clear()
        await works(pool)
    wrong = [result for result in results if result != "done" and not isinstance(result, SandboxError)]
    assert wrong == []
    if rates.cut:
        assert provider.faults.counts["cut"] > 0
    else:
        assert results == ["done"] * 12


@pytest.mark.parametrize("kind", ["duplicate", "reorder"])
async def test_bytes_that_come_twice_or_in_another_order_are_never_an_answer(config: PoolConfig, kind: str) -> None:
    async with faulty_pool(config, seed=3) as (pool, provider):
        async with pool.lease("t") as box:
            provider.faults.rates = Rates(**{kind: 0.2})
            try:
                async with asyncio.timeout(30):
                    for turn in range(30):
                        result = await box.exec(f"echo {turn} >> log; cat log", timeout_s=5)
                        assert result.output == "".join(f"{n}\n" for n in range(turn + 1))
            except (SandboxError, TimeoutError):
                pass
            provider.faults.clear()
        await works(pool)
    assert provider.faults.counts[kind] > 0


async def test_faults_by_chance_follow_the_seed(config: PoolConfig) -> None:
    context = ProviderContext.of(config, "x")
    options = {"rates": {"start_fails": 0.5, "cut": 0.3}, "seed": 9}
    drawn = [
        [(faults.take_start(), faults.happens("cut")) for _ in range(40)]
        for faults in (FaultyProvider(context, options).faults, FaultyProvider(context, options).faults)
    ]
    assert drawn[0] == drawn[1]
    assert {kind for kind, _ in drawn[0]} == {"fails", None}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)], check=True)
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


async def test_a_full_disk_is_told_and_over_when_there_is_room(small_disk: Path, config: PoolConfig) -> None:
    async with faulty_pool(config.model_copy(update={"scratch_min_mb": 8, "scratch_dir": small_disk})) as (pool, _):
        with full_disk(small_disk):
            await eventually(lambda: pool.status().hosts[0].unhealthy)
            with pytest.raises(SandboxError):
                await pool.acquire("t", timeout_s=0.5)
        await eventually(lambda: not pool.status().hosts[0].unhealthy)
        await works(pool)
    assert list(small_disk.iterdir()) == []  # noqa: ASYNC240


def test_a_disk_of_others_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandbox_pool.faults.machine_faults.LARGEST_FILLED_BYTES", 0)
    with pytest.raises(ValueError, match="fill a small disk of your own"), full_disk(tmp_path):
        pytest.fail("it was filled")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [86_400.0, -86_400.0])
async def test_a_clock_that_jumps_costs_no_lease(config: PoolConfig, seconds: float) -> None:
    async with faulty_pool(config) as (pool, _), pool.lease("t") as box:
        before = time.time()
        with jumped_clock(seconds):
            assert abs(time.time() - before - seconds) < 3600
            assert (await box.exec("echo hi")).output == "hi\n"
            assert await works(pool) == box.host
        assert (await box.exec("echo on")).output == "on\n"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rate": {}}, "unknown key 'rate'"),
        ({"rates": {"cut": 2}}, "rates.cut"),
        ({"provider": "nowhere"}, "there is no provider 'nowhere'"),
    ],
)
def test_options_that_are_wrong_are_refused_by_name(config: PoolConfig, options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        FaultyProvider(ProviderContext.of(config, "x"), options)


async def test_it_is_loaded_by_its_public_name_and_gc_finds_its_hosts(config: PoolConfig) -> None:
    named = config.model_copy(update={"provider": "hermes_rl.testing:FaultyProvider"})
    async with SlotPool.from_config(named) as pool:
        await works(pool)
