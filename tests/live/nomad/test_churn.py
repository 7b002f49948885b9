"""Two hundred leases while allocations are stopped and killed at random: each ends well or as lost, nothing stays."""

import asyncio
import contextlib
import os
import random
import signal
import urllib.error

import pytest

from sandbox_pool import SandboxLost, SlotPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

CYCLES = 200
DEADLINE_S = 90.0
AT_ONCE = 8


def hurt(agent, chance):
    """Stop one running allocation through Nomad, or kill its processes behind Nomad's back."""
    running = agent.running()
    if not running:
        return
    victim = chance.choice(running)["ID"]
    with contextlib.suppress(OSError, urllib.error.HTTPError):
        if chance.random() < 0.5:
            agent.call("PUT", f"/v1/allocation/{victim}/stop")
        else:
            for pid, command in agent.processes():
                if victim in command and "server.py" in command:
                    os.kill(pid, signal.SIGKILL)


async def test_every_lease_ends_well_or_as_lost_and_nothing_is_left(make_config, agent, cluster):
    chance = random.Random(9)
    outcomes = {"well": 0, "lost": 0}
    gate = asyncio.Semaphore(AT_ONCE)
    config = make_config(slots_per_host=4, max_hosts=3, max_starting=3, start_attempts=8)

    async def cycle(pool, number):
        async with gate, asyncio.timeout(DEADLINE_S):
            try:
                async with pool.lease(f"t{number}", timeout_s=DEADLINE_S) as box:
                    done = await box.exec(f"echo {number} > f; sleep 0.2; cat f", timeout_s=20)
                assert done.output == f"{number}\n"
                outcomes["well"] += 1
            except SandboxLost:
                outcomes["lost"] += 1

    async def trouble():
        while True:
            await asyncio.sleep(chance.uniform(0.3, 1.5))
            await cluster(hurt, agent, chance)

    async with SlotPool.from_config(config) as pool:
        troublemaker = asyncio.create_task(trouble())
        await asyncio.gather(*(cycle(pool, number) for number in range(CYCLES)))
        troublemaker.cancel()
        lost_hosts = pool.metrics.counts["lost_hosts"]
    print(outcomes, "hosts lost:", lost_hosts)
    assert sum(outcomes.values()) == CYCLES
    assert lost_hosts > 0
    assert outcomes["well"] > 0
    assert await cluster(agent.children) == []
    assert agent.processes() == []
