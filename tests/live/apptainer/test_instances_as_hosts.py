"""Hosts in instances of the real apptainer, run by an ordinary user. Prepared by tests/live/apptainer/prepare.sh."""

import asyncio
import contextlib
import os
import shutil
import signal

import pytest

from sandbox_pool import SandboxLost, SandboxSpec, SlotPool
from sandbox_pool.config import ImageSettings
from sandbox_pool.errors import HostStartFailed
from sandbox_pool.journal.journal import Journal
from support.apptainer_place import USER
from support.cli_verb import run_verb
from support.image_layouts import BUSYBOX, Made, base_layer, entry, folder, link, pack
from support.image_registry import PROGRAM, running_registry
from support.pool_clients import busy_client, kill
from support.pool_trials import promises, random_leases
from support.pool_wait import started

pytestmark = pytest.mark.timeout(600)
slow = pytest.mark.slow


async def test_one_instance_holds_all_slots_and_goes_with_the_pool(make_config, apptainer):
    async with SlotPool.from_config(make_config()) as pool:
        boxes = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
        outputs = [(await box.exec("echo $((6 * 7))")).output for box in boxes]
        assert len(apptainer.instances()) == 1
        for box in boxes:
            await box.release()
    assert outputs == ["42\n"] * 4
    assert apptainer.instances() == {}


async def test_a_name_is_one_instance_for_every_process_and_a_stop_by_any_of_them_ends_it(make_provider, apptainer):
    first, second = make_provider(), make_provider()
    host = await first.start("hrl-one", SandboxSpec())
    again = await second.start("hrl-one", SandboxSpec())
    assert (again.identity, again.address) == (host.identity, host.address)
    (record,) = await second.list()
    assert (record.name, record.state) == ("hrl-one", "running")
    await second.stop("hrl-one")
    await first.stop("hrl-one")
    assert await first.list() == []
    assert apptainer.instances() == {}


@pytest.mark.skipif(BUSYBOX is None, reason="no busybox")
@pytest.mark.parametrize("by", ["layout", "registry"])
async def test_an_ordinary_users_slot_is_the_image_of_its_spec(make_config, apptainer, tmp_path, by):
    """Its layers lie outside of the instance, which has room for 64 MB."""
    made = Made([base_layer(), pack([entry("big", data=os.urandom(80 << 20))])], {"Env": ["A=b"], "WorkingDir": "/app"})
    store = apptainer.folder / f"store-{by}"
    store.mkdir(mode=0o700)
    shutil.chown(store, USER)
    with contextlib.ExitStack() as stack:
        if by == "layout":
            image = made.layout(tmp_path / "image")
        elif PROGRAM is None:
            pytest.skip("docker-registry is not installed")
        else:
            image = stack.enter_context(running_registry(tmp_path / "registry")).push(made, "big", "1")
        config = make_config(images=ImageSettings(store_dir=store))
        async with SlotPool.from_config(config) as pool, pool.lease("t", SandboxSpec(image=image)) as box:
            seen = await box.exec("pwd; echo $A; stat -c %s /big; cat main.py")
    assert seen.output == "/app\nb\n83886080\nprint('hi')\n"
    assert len(list(store.glob("*/layers/*"))) == 2


def test_what_a_killed_client_left_is_removed_by_gc(make_config, apptainer, tmp_path):
    config = make_config(slots_per_host=20, owner_ttl_s=1000)
    client = busy_client(config, tmp_path, 20)
    try:
        assert len(apptainer.instances()) == 1
    finally:
        kill(client)
    assert run_verb("pool", "gc", "--state-dir", str(config.state_dir)) == 0
    assert (apptainer.instances(), apptainer.left()) == ({}, [])
    journal = Journal(config.state_dir)
    assert journal.hosts() == []
    journal.close()


@slow
async def test_the_next_pool_takes_over_what_a_killed_client_left(make_config, apptainer, tmp_path):
    config = make_config(slots_per_host=2, owner_ttl_s=1000)
    client = await asyncio.to_thread(busy_client, config, tmp_path, 2)
    try:
        (name,) = apptainer.instances()
    finally:
        kill(client)
    async with SlotPool.from_config(config) as pool, pool.lease("t") as box:
        assert box.host_info.host_id == name
        assert "7777" not in (await box.exec("ps ax -o args")).output


@slow
async def test_an_instance_that_is_killed_ends_its_leases_as_lost(make_config, apptainer):
    async with SlotPool.from_config(make_config()) as pool:
        box = await pool.acquire("t")
        running = await started(box, "sleep 1000")
        (pid,) = apptainer.instances().values()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await running
        async with pool.lease("next") as other:
            assert (await other.exec("echo on")).output == "on\n"


@slow
@pytest.mark.parametrize("kind", ["sif", "docker-archive"])
async def test_hosts_run_in_a_sif_file_and_in_an_archive_that_becomes_one_once(make_config, apptainer, tmp_path, kind):
    image = apptainer.home / "box.sif"
    if kind == "sif":
        apptainer.run("build", "--force", str(image), str(apptainer.box))
    else:
        links = [link(name, f"usr/{name}") for name in ("bin", "lib", "lib64")]
        folders = [folder(name) for name in ("usr", "etc", "tmp", "var", "proc", "sys", "dev", "root")]
        image = Made([pack([*links, *folders])]).docker_archive(apptainer.folder / "box.tar")
    config = make_config({"image": str(image)})
    for _ in range(2):
        async with SlotPool.from_config(config) as pool, pool.lease("t") as box:
            assert (await box.exec("echo $((6 * 7))")).output == "42\n"
    kept = list((apptainer.home / ".apptainer/cache/hermes-rl").glob("*.sif"))
    assert len(kept) == (0 if kind == "sif" else 1)


@slow
async def test_the_reason_why_a_host_does_not_start_is_told(make_provider):
    with pytest.raises(HostStartFailed, match=r"there is no image '/no/such\.sif'"):
        await make_provider(image="/no/such.sif").start("hrl-bad", SandboxSpec())
    with pytest.raises(HostStartFailed, match="no-such-python"):
        await make_provider(image_python="/no-such-python").start("hrl-bad", SandboxSpec())
    with pytest.raises(HostStartFailed, match="/no/apptainer cannot be run"):
        await make_provider(apptainer="/no/apptainer", image="docker://x").start("hrl-bad", SandboxSpec())


@slow
async def test_every_promise_holds_in_an_instance(make_config):
    kept, broken = await promises(make_config(slots_per_host=16))
    assert (broken, kept > 100) == ({}, True)


@slow
async def test_random_leases_under_random_kills_are_done_or_lost_and_nothing_is_left(make_config, apptainer):
    async def kill(chance):
        running = list((await asyncio.to_thread(apptainer.instances)).values())
        if running:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(chance.choice(running), signal.SIGKILL)
        return running

    await random_leases(make_config(max_hosts=2, min_hosts=2), kill)
