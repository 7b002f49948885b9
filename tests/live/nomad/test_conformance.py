"""The same promises as on this machine, kept by slots on a Nomad agent, at the same level of isolation."""

import asyncio
import subprocess

import pytest

from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from sandbox_pool.conformance import all_checks, run_checks
from sandbox_pool.conformance.runner import make_context
from support.containers import Unavailable, debian_root
from support.image_layouts import Made


async def run_all(config):
    async with SlotPool.from_config(config) as pool:
        context = await make_context(pool)
        results = {result.id: result async for result in run_checks(all_checks(), context)}
        context.close()
        return context.info, results


async def level_here(tmp_path):
    config = PoolConfig(slots_per_host=1, state_dir=tmp_path / "here")
    async with SlotPool.from_config(config) as pool, pool.lease("t") as box:
        return box.host_info


@pytest.mark.timeout(300)
def test_raw_exec_keeps_every_promise_at_the_level_of_local_slots(make_config, tmp_path):
    info, results = asyncio.run(run_all(make_config(slots_per_host=16)))
    here = asyncio.run(level_here(tmp_path))
    assert (info.isolation, info.variant, info.missing) == (here.isolation, here.variant, here.missing)
    assert {each.id: each.detail for each in results.values() if each.verdict == "failed"} == {}
    assert len(results) == len(all_checks())
    not_promised = [each.id for each in results.values() if each.verdict == "not promised"]
    assert not_promised == [] or here.isolation != "namespaces" or here.missing


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_raw_exec_keeps_every_promise_in_an_image_that_the_client_sends(make_config, tmp_path):
    try:
        packed = subprocess.run(["tar", "-C", debian_root(), "-c", "."], check=True, capture_output=True).stdout
    except Unavailable as error:
        pytest.skip(str(error))
    settings = {"WorkingDir": "/testbed", "Env": ["PATH=/usr/sbin:/usr/bin:/sbin:/bin"]}
    image = Made([packed], settings, compress=bytes).layout(tmp_path)
    config = make_config(slots_per_host=16, spec=SandboxSpec(image=image))
    info, results = asyncio.run(run_all(config))
    assert info.isolation == "namespaces"
    assert {each.id: each.detail for each in results.values() if each.verdict == "failed"} == {}
    assert sum(each.verdict == "passed" for each in results.values()) >= 100
