"""Hosts in containers of a real docker and a real podman engine. Prepared by tests/live/docker/prepare.sh."""

import asyncio
import contextlib
import json
import os
import subprocess
from pathlib import Path

import aiohttp
import pytest

from environments.apps.doctor import doctor_checks
from sandbox_pool import PoolConfig, SandboxLost, SandboxSpec, SlotPool
from sandbox_pool.errors import HostStartFailed
from sandbox_pool.journal.journal import Journal
from sandbox_pool.providers.docker import docker_engine, docker_provider
from support import container_engines
from support.cli_verb import run_verb
from support.pool_clients import busy_client, kill
from support.pool_trials import random_leases
from support.pool_wait import eventually

pytestmark = pytest.mark.timeout(300)

slow = pytest.mark.slow


async def test_slots_of_one_container_run_commands_and_the_container_goes_with_the_pool(make_config, engine):
    options = {"memory_mb": 900, "cpu": 1.5, "labels": ["team=rl"]}
    async with SlotPool.from_config(make_config(options=options)) as pool:
        boxes = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
        outputs = [(await box.exec("echo $((6 * 7)); hostname")).output for box in boxes]
        (name,) = engine.containers()
        (facts,) = json.loads(engine.run("inspect", name))
        for box in boxes:
            await box.release()
    assert {output.split()[0] for output in outputs} == {"42"}
    assert facts["HostConfig"]["Memory"] == 900 << 20
    assert facts["Config"]["Labels"]["team"] == "rl"
    assert facts["HostConfig"]["Privileged"] is False
    assert (engine.containers(), engine.volumes()) == ([], [])


@slow
async def test_slots_are_reached_through_an_exec_of_the_engine_as_well(make_config, engine):
    async with SlotPool.from_config(make_config(options={"data_path": "exec"})) as pool, pool.lease("t") as box:
        data = os.urandom(3_000_000)
        await box.write_file("f", data)
        assert await box.read_file("f") == data
        assert (await box.exec("wc -c < f")).output.strip() == "3000000"
    assert engine.containers() == []


async def test_a_name_is_one_container_and_a_stopped_one_is_gone(make_provider, engine):
    first, second = make_provider(), make_provider()
    host = await first.start("hrl-one", SandboxSpec())
    again = await second.start("hrl-one", SandboxSpec())
    assert (again.identity, again.address) == (host.identity, host.address)
    (record,) = await second.list()
    assert (record.name, record.owner, record.state) == ("hrl-one", "machine_boot_ns_1_1", "running")
    await second.stop("hrl-one")
    await first.stop("hrl-one")
    assert await first.list() == []
    assert engine.volumes() == []


@slow
async def test_containers_that_are_watched_leave_connections_for_the_rest(make_provider, monkeypatch):
    class Narrow(aiohttp.UnixConnector):
        def __init__(self, path):
            super().__init__(path, limit=1)  # a hundred by default, and as many containers would take them all

    monkeypatch.setattr(aiohttp, "UnixConnector", Narrow)
    provider = make_provider(api_timeout_s=20)
    for name in ("hrl-a", "hrl-b"):
        await provider.start(name, SandboxSpec())
    assert {record.name for record in await provider.list()} == {"hrl-a", "hrl-b"}


@slow
async def test_a_create_whose_answer_is_lost_leaves_nothing(make_provider, engine, monkeypatch):
    provider = make_provider()
    containers = type(provider._engine().containers)
    create = containers.create

    async def lose_the_answer(self, config, *, name):
        await create(self, config, name=name)
        raise TimeoutError

    monkeypatch.setattr(containers, "create", lose_the_answer)
    with pytest.raises(HostStartFailed):
        await provider.start("hrl-lost", SandboxSpec())
    monkeypatch.undo()
    assert engine.containers() == ["hrl-lost"]
    await provider.stop("hrl-lost")
    assert engine.containers() == []


@slow
async def test_a_container_that_is_killed_ends_its_leases_as_lost(make_config, engine):
    async with SlotPool.from_config(make_config()) as pool:
        box = await pool.acquire("t")
        running = asyncio.create_task(box.exec("sleep 1000"))
        (name,) = engine.containers()
        await asyncio.to_thread(engine.run, "kill", name)
        with pytest.raises(SandboxLost):
            await running
        async with pool.lease("next") as other:
            assert (await other.exec("echo on")).output == "on\n"


def test_containers_of_a_killed_client_are_removed_by_gc(make_config, engine, tmp_path):
    config = make_config(slots_per_host=20)
    client = busy_client(config, tmp_path, 20)
    (name,) = engine.containers()
    assert docker_provider._socket_folder(name).exists()
    kill(client)
    assert run_verb("pool", "gc", "--state-dir", str(config.state_dir)) == 0
    assert (engine.containers(), engine.volumes()) == ([], [])
    assert not docker_provider._socket_folder(name).exists()
    journal = Journal(config.state_dir)
    assert journal.hosts() == []
    journal.close()


async def test_doctor_says_what_can_be_used_and_what_would_have_to_be_done(engine, monkeypatch):
    monkeypatch.setenv("CONTAINER_HOST" if engine.kind == "podman" else "DOCKER_HOST", engine.host)
    ask = getattr(doctor_checks, engine.kind)
    found = await ask()
    assert (found.status, f"--provider {engine.kind}" in found.fix) == ("limited", engine.kind == "podman")
    engine.run("tag", container_engines.IMAGE, docker_engine.IMAGE)
    assert (await ask()).status == "ok"
    engine.run("rmi", docker_engine.IMAGE)


@slow
async def test_the_reason_why_a_container_does_not_start_is_told(make_provider):
    with pytest.raises(HostStartFailed, match=r"(?i)no such file"):
        await make_provider(python="/nosuch").start("hrl-a", SandboxSpec())
    with pytest.raises(HostStartFailed, match="no-such-image"):
        await make_provider(image="localhost/no-such-image").start("hrl-b", SandboxSpec())
    with pytest.raises(HostStartFailed, match="runsc"):
        await make_provider(runtime="runsc").start("hrl-c", SandboxSpec())


@slow
async def test_random_leases_under_random_kills_are_done_or_lost_and_nothing_is_left(make_config, engine):
    async def kill(chance):
        running = (await asyncio.to_thread(engine.run, "ps", "--format", "{{.Names}}")).split()
        if running:
            with contextlib.suppress(subprocess.CalledProcessError):  # it ended meanwhile
                await asyncio.to_thread(engine.run, "kill", chance.choice(running))
        return running

    await random_leases(make_config(max_hosts=2, min_hosts=2), kill)
    assert (engine.containers(), engine.volumes()) == ([], [])


@slow
async def test_rootless_podman_gives_slots_to_its_user(engines, tmp_path):
    engine = engines("rootless")
    options = engine.options(data_path="exec")
    config = PoolConfig(provider="podman", provider_options=options, state_dir=tmp_path, slots_per_host=2, max_hosts=1)
    async with SlotPool.from_config(config) as pool, pool.lease("t") as box:
        assert (await box.exec("echo $((6 * 7))")).output == "42\n"
        (name,) = engine.containers()
        pid = engine.run("inspect", "--format", "{{.State.Pid}}", name)
        owner = await asyncio.to_thread(Path(f"/proc/{pid}").stat)
        assert owner.st_uid != 0
    await eventually(lambda: engine.containers() == [])
