"""Hosts on the nodes of an allocation of a real Slurm (Debian's slurm-wlm, two nodes on this machine)."""

import asyncio
import contextlib
import subprocess

import pytest

from sandbox_pool import HostStartFailed, SandboxLost, SandboxSpec, SlotPool
from sandbox_pool.journal.journal import Journal
from sandbox_pool.journal.owner import this_process
from sandbox_pool.providers.base import ProviderContext, load_provider
from support.apptainer_place import OPTIONS, ApptainerPlace
from support.cli_verb import run_verb
from support.containers import Unavailable
from support.pool_clients import busy_client, kill
from support.pool_trials import promises, random_leases
from support.pool_wait import eventually, started

pytestmark = pytest.mark.timeout(600)
slow = pytest.mark.slow


async def test_hosts_are_spread_over_the_nodes_of_the_job(make_config, cluster, job):
    async with SlotPool.from_config(make_config()) as pool:
        boxes = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
        assert [(await box.exec("echo $((6 * 7))")).output for box in boxes] == ["42\n"] * 4

        def steps():
            lines = cluster.run("squeue", "--steps", "--noheader", "--format=%j|%N", f"--jobs={job}").split()
            return sorted(line for line in lines if line.startswith("hermes-rl|"))

        # Slurm lists those of the pool before for a moment after they ended.
        await eventually(lambda: steps() == ["hermes-rl|n1", "hermes-rl|n2"])
        for box in boxes:
            await box.release()


@slow
async def test_what_a_killed_client_left_ends_with_its_steps_and_gc_forgets_it(make_config, cluster, job, tmp_path):
    config = make_config(slots_per_host=20, min_hosts=1, max_hosts=1)
    client = await asyncio.to_thread(busy_client, config, tmp_path, 20)
    assert len(cluster.steps(job)) == 1
    await asyncio.to_thread(kill, client)
    await eventually(lambda: cluster.steps(job) == [])
    assert await asyncio.to_thread(run_verb, "pool", "gc", "--state-dir", str(config.state_dir)) == 0
    assert _recorded(config) == []


@slow
async def test_hosts_of_a_job_that_was_cancelled_are_lost_and_nothing_is_left(make_config, cluster, job):
    config = make_config()
    async with SlotPool.from_config(config) as pool:
        box = await pool.acquire("t")
        running = await started(box, "sleep 1000")
        cluster.run("scancel", job)
        with pytest.raises(SandboxLost):
            await running
    assert _recorded(config) == []


@slow
async def test_a_gc_outside_of_the_job_looks_at_the_job_of_the_journal(make_config, job, tmp_path, monkeypatch):
    config = make_config(slots_per_host=2, min_hosts=1, max_hosts=1)
    client = await asyncio.to_thread(busy_client, config, tmp_path, 2)
    await asyncio.to_thread(kill, client)
    monkeypatch.delenv("SLURM_JOB_ID")
    assert await asyncio.to_thread(run_verb, "pool", "gc", "--state-dir", str(config.state_dir)) == 0
    assert _recorded(config) == []


@slow
async def test_outside_of_an_allocation_and_on_a_foreign_node_the_reason_is_told(make_config, job, monkeypatch):
    with pytest.raises(HostStartFailed, match=f"n7 is not a node of the job {job}, which has n1, n2"):
        await _start(make_config({"nodes": ["n7"]}))
    with pytest.raises(HostStartFailed, match="the Slurm job 99999 does not run"):
        await _start(make_config({"job": "99999"}))
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(HostStartFailed, match="not inside a Slurm allocation"):
        await _start(make_config())


@slow
async def test_hosts_run_in_an_apptainer_image_on_the_nodes(make_config, tmp_path, images, monkeypatch):
    try:
        place = ApptainerPlace(images)
    except Unavailable as error:
        pytest.skip(str(error))
    monkeypatch.setenv("APPTAINER_CONFIGDIR", str(tmp_path / "config"))
    # Not with all of root's capabilities: test machines lack some.
    image = {"image": str(place.box), "apptainer": place.program, "flags": ["--userns"], **OPTIONS}
    listing = [place.program, "instance", "list", "--json"]
    async with SlotPool.from_config(make_config(image)) as pool, pool.lease("t") as box:
        assert (await box.exec("echo $((6 * 7))")).output == "42\n"
        assert (await asyncio.to_thread(subprocess.check_output, listing, text=True)).count("hrl-slurm-") >= 2
    left = await asyncio.to_thread(subprocess.check_output, listing, text=True)
    assert "hrl-slurm-" not in left


@slow
async def test_every_promise_holds_on_a_node(make_config):
    kept, broken = await promises(make_config(slots_per_host=16, min_hosts=1, max_hosts=1))
    assert (broken, kept > 100) == ({}, True)


@slow
async def test_random_leases_while_steps_are_cancelled_are_done_or_lost_and_nothing_is_left(make_config, cluster, job):
    async def cancel(chance):
        running = await asyncio.to_thread(cluster.steps, job)
        if running:
            hard = chance.choice([["--signal=KILL"], []])
            with contextlib.suppress(subprocess.CalledProcessError):  # it ended meanwhile
                await asyncio.to_thread(cluster.run, "scancel", *hard, chance.choice(running))
        return running

    await random_leases(make_config(slots_per_host=4), cancel)


async def _start(config):
    provider = load_provider("slurm", ProviderContext.of(config, this_process().tag()), config.provider_options)
    try:
        await provider.start("hrl-one", SandboxSpec())
    finally:
        await provider.close()


def _recorded(config):
    journal = Journal(config.state_dir)
    try:
        return journal.hosts()
    finally:
        journal.close()
