"""A slot server that is there but does not answer: nobody waits for it for ever."""

import asyncio
import os
import signal

import pytest

from sandbox_pool import PoolConfig, SandboxLost, SlotPool
from support.pool_leftovers import cgroup_name, leftovers
from support.pool_wait import eventually, started


@pytest.fixture
def config(tmp_path):
    return PoolConfig(
        slots_per_host=2,
        max_hosts=1,
        state_dir=tmp_path / "state",
        scratch_dir=tmp_path / "s",
        health_interval_s=0.2,
        health_timeout_s=0.5,
        health_failures=2,
        lost_after_s=1.5,
    )


async def test_a_frozen_server_is_lost_replaced_and_removed(config, tmp_path):
    async with SlotPool.from_config(config) as pool:
        lease = await pool.acquire("t")
        cgroups = [cgroup_name(tmp_path / "s" / f"hermes-rl-{os.getuid()}" / lease.host / "scratch")]
        running = await started(lease, "sleep 300")
        os.kill(lease.host_info.pid, signal.SIGSTOP)
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(running, 30)
        async with pool.lease("next", timeout_s=30) as box:
            assert box.host != lease.host
            assert (await box.exec("echo on")).output == "on\n"
    assert leftovers(tmp_path / "s", cgroups) == {}


async def test_a_short_freeze_costs_nothing(config):
    patient = config.model_copy(update={"lost_after_s": 60.0})
    async with SlotPool.from_config(patient) as pool, pool.lease("t") as box:
        await box.exec("export KEPT=1")
        os.kill(box.host_info.pid, signal.SIGSTOP)
        await eventually(lambda: pool.status().hosts[0].unhealthy)
        os.kill(box.host_info.pid, signal.SIGCONT)
        assert (await box.exec("echo $KEPT")).output == "1\n"
        assert pool.metrics.counts["lost_hosts"] == 0


async def test_an_answer_that_never_comes_is_not_waited_for_much_longer_than_the_timeout(config, monkeypatch):
    monkeypatch.setattr("sandbox_pool.pool.lease.ANSWER_GRACE_S", 0.3)
    monkeypatch.setattr("sandbox_pool.client.connection.CANCEL_TIMEOUT_S", 0.3)
    patient = config.model_copy(update={"lost_after_s": 60.0})
    async with SlotPool.from_config(patient) as pool:
        lease = await pool.acquire("t")
        running = await started(lease, "sleep 300")  # so that the next command needs the server
        os.kill(lease.host_info.pid, signal.SIGSTOP)
        with pytest.raises(SandboxLost, match="gave no answer"):
            await asyncio.wait_for(lease.exec("echo hi", timeout_s=0.2), 30)
        os.kill(lease.host_info.pid, signal.SIGCONT)
        await lease.release()
        await asyncio.gather(running, return_exceptions=True)
