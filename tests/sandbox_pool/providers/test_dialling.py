"""A provider that dials opens every connection to its hosts: the pool's own, and those of other loops."""

import asyncio
from dataclasses import replace

import pytest

from sandbox_pool import PoolConfig, SandboxLost, SlotPool
from sandbox_pool.client.connection import dial
from sandbox_pool.journal.owner import this_process
from sandbox_pool.providers.base import ProviderContext
from sandbox_pool.providers.local import LocalProvider


class HiddenProvider(LocalProvider):
    dialled = 0
    answers = True

    async def start(self, name, spec):
        host = await super().start(name, spec)
        return replace(host, address=f"hidden:{host.address}")

    async def dial(self, protocol, address):
        self.dialled += 1
        if not self.answers:
            raise ConnectionError("nobody in there")
        return await dial(protocol, address.removeprefix("hidden:"))


@pytest.fixture
async def pool(tmp_path):
    config = PoolConfig(state_dir=tmp_path / "state", scratch_dir=tmp_path / "s", slots_per_host=2, max_hosts=1)
    provider = HiddenProvider(ProviderContext.of(config, this_process().tag()), {})
    async with SlotPool(config, provider) as pool:
        pool.hidden = provider
        yield pool


async def say(pool, words):
    async with pool.lease("task") as box:
        return (await box.exec(f"echo {words}")).output


async def test_every_loop_reaches_the_hosts_through_the_provider(pool):
    assert await say(pool, "here") == "here\n"
    assert pool.hidden.dialled == 1
    assert await asyncio.to_thread(asyncio.run, say(pool, "there")) == "there\n"
    assert pool.hidden.dialled == 2


async def test_a_dial_that_fails_is_sandbox_lost(pool):
    async with pool.lease("task") as box:
        pool.hidden.answers = False
        with pytest.raises(SandboxLost, match=r"no slot server at hidden:unix:.*: nobody in there"):
            await pool.connect(box.endpoint.address, box.endpoint.token)
