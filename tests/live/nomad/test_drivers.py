"""Other ways to run a host: in an Apptainer image, in another namespace, from a server that the nodes already have."""

import shutil
import urllib.parse

import pytest

from sandbox_pool import SandboxSpec, SlotPool
from sandbox_pool.providers.base import ProviderContext, load_provider
from sandbox_pool.server.build.packing import pack
from support.apptainer_place import SEARCH
from support.containers import Unavailable, debian_root
from support.pool_trials import promises

STAND_IN = """#!/bin/sh
# Stands in for apptainer: writes down how it was called, then runs the command on the node itself.
for word in "$@"; do printf '%s\\n' "$word"; done | head -20 > {calls}
while [ "$1" != /images/test.sif ]; do shift; done
shift
exec "$@"
"""

pytestmark = pytest.mark.timeout(120)


async def uses(pool):
    async with pool.lease("t", timeout_s=60) as box:
        return (await box.exec("echo used")).output


async def test_nomad_accepts_the_job_of_every_driver(make_config, agent, cluster):
    for options in ({}, {"driver": "docker", "image": "i"}, {"driver": "apptainer", "image": "/i.sif"}):
        config = make_config(options)
        provider = load_provider("nomad", ProviderContext.of(config, "o"), config.provider_options)
        job = provider.job(SandboxSpec())
        answer = await cluster(agent.call, "PUT", "/v1/validate/job", {"Job": job})
        assert (answer["Error"], answer["ValidationErrors"], answer["Warnings"]) == ("", None, "")


async def test_an_apptainer_host_is_a_raw_exec_task_that_enters_the_image(make_config, tmp_path):
    program, calls = tmp_path / "apptainer", tmp_path / "calls"
    program.write_text(STAND_IN.format(calls=calls))
    program.chmod(0o755)
    options = {"driver": "apptainer", "image": "/images/test.sif", "apptainer": str(program)}
    async with SlotPool.from_config(make_config(options)) as pool:
        assert await uses(pool) == "used\n"
    words = calls.read_text().splitlines()
    assert words[:2] == ["exec", "--no-home"]
    assert any("/alloc/" in word for word in words)
    assert "${" not in " ".join(words[:8])


@pytest.mark.slow
async def test_every_promise_is_kept_in_a_real_apptainer(make_config):
    program = shutil.which("apptainer", path=SEARCH)
    if program is None:
        pytest.skip("no apptainer here: run tests/live/apptainer/prepare.sh")
    try:
        image = debian_root()
    except Unavailable as error:
        pytest.skip(str(error))
    # As root it asks for every capability, which root of a test machine may lack.
    options = {"driver": "apptainer", "image": str(image), "apptainer": program, "apptainer_args": ["--userns"]}
    config = make_config(options, slots_per_host=16)
    kept, broken = await promises(config)
    assert (broken, kept > 100) == ({}, True)


async def test_a_server_that_the_node_already_has_is_not_sent(make_config, tmp_path):
    path = tmp_path / "slot-server.pyz"
    path.write_bytes(pack())
    async with SlotPool.from_config(make_config({"server_path": str(path)})) as pool:
        assert await uses(pool) == "used\n"


@pytest.mark.slow
async def test_hosts_live_in_the_namespace_they_are_given(make_config, agent, cluster, tmp_path):
    await cluster(agent.call, "PUT", "/v1/namespace/rl", {"Name": "rl"})
    config = make_config({"namespace": "rl"})
    (tmp_path / "nomad.acl").write_text(agent.token)
    async with SlotPool.from_config(config) as pool:
        assert await uses(pool) == "used\n"
        jobs = await cluster(agent.call, "GET", "/v1/jobs", namespace="rl")
        assert len(jobs) == 2
        assert await cluster(agent.children) == []
    assert await cluster(agent.call, "GET", "/v1/jobs", namespace="rl") == []
    await cluster(agent.call, "DELETE", f"/v1/namespace/{urllib.parse.quote('rl')}")
