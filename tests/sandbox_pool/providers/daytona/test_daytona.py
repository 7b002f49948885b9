"""Hosts in sandboxes of an emulated Daytona, through its unmodified SDK."""

import asyncio
import os
import random
from collections import Counter

import pytest

from sandbox_pool import HostStartFailed, SandboxLost, SandboxSpec, SlotPool
from sandbox_pool.conformance import all_checks, run_checks
from sandbox_pool.conformance.runner import make_context
from sandbox_pool.journal.journal import Journal
from sandbox_pool.journal.owner import this_process
from sandbox_pool.providers.base import ProviderContext, load_provider
from sandbox_pool.providers.daytona import daytona_provider
from support.cli_verb import run_verb
from support.pool_wait import eventually, started
from support.ssh_machines import busy_client, kill

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
    async with SlotPool.from_config(make_config(slots_per_host=16)) as pool:
        context = await make_context(pool)
        results = {result.id: result async for result in run_checks(all_checks(), context)}
        context.close()
    assert {each.id: each.detail for each in results.values() if each.verdict == "failed"} == {}
    assert len(results) == len(all_checks())


@slow
async def test_random_leases_under_random_losses_are_done_or_lost_and_nothing_is_left(make_config, place):
    chance = random.Random(20)
    todo, ends = iter(range(200)), Counter()
    commands = ("echo hi", "sleep 0.2; echo hi", "head -c 2000000 /dev/urandom | wc -c", "seq 100000 | tail -1")

    async def work(pool):
        for number in todo:
            try:
                async with pool.lease(f"t{number}") as box:
                    for command in chance.choices(commands, k=3):
                        result = await box.exec(command, timeout_s=120)
                        assert (result.exit_code, result.timed_out) == (0, False)
                    ends["done"] += 1
            except SandboxLost:
                ends["lost"] += 1

    async with SlotPool.from_config(make_config(max_hosts=2, min_hosts=2, start_attempts=5)) as pool:
        working = [asyncio.create_task(work(pool)) for _ in range(8)]
        losses = 0
        while not all(task.done() for task in working):
            await asyncio.wait(working, timeout=chance.uniform(1, 4))
            running = [
                entry.asked["name"] for entry in list(place.daytona.entries.values()) if entry.state == "started"
            ]
            if running and losses < 8:
                await asyncio.to_thread(place.call, place.daytona.lose(chance.choice(running)))
                losses += 1
        await asyncio.gather(*working)
    print(f"daytona: {dict(ends)} under {losses} losses")
    assert ends.total() == 200
    assert ends["done"] > 0
    assert ends["lost"] > 0
    assert place.daytona.running == []
