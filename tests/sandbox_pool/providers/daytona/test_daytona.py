"""Hosts in sandboxes of an emulated Daytona, through its unmodified SDK."""

import asyncio
import os

import pytest

from sandbox_pool import HostStartFailed, SandboxLost, SandboxSpec, SlotPool
from sandbox_pool.journal.journal import Journal
from sandbox_pool.journal.owner import this_process
from sandbox_pool.providers.base import ProviderContext, load_provider
from sandbox_pool.providers.daytona import daytona_provider
from support.cli_verb import run_verb
from support.pool_clients import busy_client, kill
from support.pool_trials import promises, random_leases
from support.pool_wait import eventually, started

pytestmark = pytest.mark.timeout(600)
slow = pytest.mark.slow


def load(config):
    return load_provider("daytona", ProviderContext.of(config, this_process().tag()), config.provider_options)


async def test_slots_of_one_sandbox_run_commands_and_the_sandbox_goes_with_the_pool(make_config, place):
    async with SlotPool.from_config(make_config()) as pool:
        boxes = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
        assert [(await box.exec("echo $((6 * 7))")).output for box in boxes] == ["42\n"] * 4
        data = os.urandom(1_000_000)
        await boxes[0].write_file("f", data)
        assert await boxes[0].read_file("f") == data
        (entry,) = place.daytona.entries.values()
        for box in boxes:
            await box.release()
    assert (entry.asked["autoStopInterval"], entry.asked["autoDeleteInterval"]) == (15, 0)
    assert entry.asked["labels"]["hermes-rl-owner"] == this_process().tag()
    assert place.daytona.running == []


async def test_a_name_is_one_sandbox_and_a_create_without_an_answer_leaves_none(make_config, place):
    first, second = load(make_config()), load(make_config())
    host = await first.start("hrl-one", SandboxSpec())
    again = await second.start("hrl-one", SandboxSpec())
    assert (again.identity, again.address) == (host.identity, host.address)
    assert [(record.name, record.state) for record in await second.list()] == [("hrl-one", "running")]
    await second.stop("hrl-one")
    await first.stop("hrl-one")
    place.daytona.lose_answers_to.add("POST /api/sandbox")
    with pytest.raises(HostStartFailed):
        await first.start("hrl-two", SandboxSpec())
    assert place.daytona.running == ["hrl-two"]
    await first.stop("hrl-two")
    assert place.daytona.running == []
    await first.close()
    await second.close()


@pytest.mark.parametrize(("named_by", "sizes"), [("snapshot", {}), ("image", {"cpu": 2, "memory_gb": 4}), ("spec", {})])
async def test_sandboxes_are_made_of_the_snapshot_or_image_that_is_named(make_config, place, tmp_path, named_by, sizes):
    (tmp_path / "marker").write_text("of the image")
    place.daytona.images["team/box:1"] = tmp_path
    options = {"snapshot": "unused", **sizes} if named_by == "spec" else {named_by: "team/box:1", **sizes}
    spec = SandboxSpec(image="team/box:1") if named_by == "spec" else SandboxSpec()
    provider = load(make_config(options))
    await provider.start("hrl-one", spec)
    (entry,) = place.daytona.entries.values()
    seen = await asyncio.to_thread(place.call, entry.box.run("cat /srv/marker", 5))
    assert seen == (0, "of the image")
    assert [entry.asked.get(name) for name in ("cpu", "memory")] == [sizes.get(name) for name in ("cpu", "memory_gb")]
    await provider.stop("hrl-one")
    await provider.close()


async def test_a_snapshot_that_does_not_exist_is_told_and_makes_nothing(make_config, place):
    provider = load(make_config({"snapshot": "no-such"}))
    with pytest.raises(HostStartFailed, match="Snapshot no-such not found"):
        await provider.start("hrl-one", SandboxSpec())
    assert place.daytona.running == []
    await provider.stop("hrl-one")
    assert place.daytona.running == []
    await provider.close()


async def test_a_wrong_key_is_told(make_config):
    provider = load(make_config({"api_key": "dtn_wrong"}))
    with pytest.raises(HostStartFailed, match="Unauthorized"):
        await provider.start("hrl-one", SandboxSpec())
    await provider.close()


@slow
async def test_a_sandbox_that_is_lost_ends_its_leases_and_the_next_one_serves(make_config, place):
    async with SlotPool.from_config(make_config()) as pool:
        box = await pool.acquire("t")
        running = await started(box, "sleep 1000")
        (name,) = place.daytona.running
        await asyncio.to_thread(place.call, place.daytona.lose(name))
        with pytest.raises(SandboxLost):
            await running
        async with pool.lease("next") as other:
            assert (await other.exec("echo on")).output == "on\n"
    assert place.daytona.running == []


@slow
def test_sandboxes_of_a_killed_client_are_removed_by_gc(make_config, place, tmp_path, monkeypatch):
    monkeypatch.setenv("DAYTONA_API_KEY", "dtn_test")  # the journal keeps no secrets
    config = make_config(slots_per_host=20)
    path = tmp_path / "client"
    path.mkdir()
    options = {name: text for name, text in config.provider_options.items() if name != "api_key"}
    client = busy_client(config.model_copy(update={"provider_options": options}), path, 20)
    assert len(place.daytona.running) == 1
    kill(client)
    assert run_verb("pool", "gc", "--state-dir", str(config.state_dir)) == 0
    assert place.daytona.running == []
    journal = Journal(config.state_dir)
    assert journal.hosts() == []
    journal.close()


@slow
async def test_a_sandbox_in_use_says_so_and_one_that_nobody_uses_is_stopped_and_deleted(
    make_config, place, monkeypatch
):
    monkeypatch.setattr(daytona_provider, "REFRESHES", 100_000)  # every few milliseconds
    used, unused = load(make_config()), load(make_config())
    await unused.start("hrl-unused", SandboxSpec())
    await unused.close()  # as when its process was killed
    await asyncio.to_thread(place.call, place.daytona.pass_minutes(10))
    await used.start("hrl-used", SandboxSpec())
    (entry,) = (each for each in place.daytona.entries.values() if each.asked["name"] == "hrl-used")
    await eventually(lambda: entry.refreshed > 1)
    await asyncio.to_thread(place.call, place.daytona.pass_minutes(6))
    assert place.daytona.running == ["hrl-used"]
    await used.stop("hrl-used")
    await used.close()


@slow
async def test_every_promise_holds_in_a_sandbox(make_config):
    kept, broken = await promises(make_config(slots_per_host=16))
    assert (broken, kept > 100) == ({}, True)


@slow
async def test_random_leases_under_random_losses_are_done_or_lost_and_nothing_is_left(make_config, place):
    async def lose(chance):
        running = [entry.asked["name"] for entry in list(place.daytona.entries.values()) if entry.state == "started"]
        if running:
            await asyncio.to_thread(place.call, place.daytona.lose(chance.choice(running)))
        return running

    await random_leases(make_config(max_hosts=2, min_hosts=2), lose)
    assert place.daytona.running == []
