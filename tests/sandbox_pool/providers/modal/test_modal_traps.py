"""Each way in which pools on Modal are on record for leaking, hanging or lying, tried on an emulated Modal."""

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from emulators.modal import TokenBucket
from sandbox_pool import AcquireTimeout, HostStartFailed, SandboxError, SandboxLost, SlotPool
from sandbox_pool.journal.gc import collect_orphans, default_place
from sandbox_pool.journal.journal import Journal
from sandbox_pool.journal.owner import this_process
from support import pool_program
from support.cli_verb import run_verb
from support.modal_place import SPEC, modal_provider, nothing_left
from support.pool_wait import eventually, started


async def cancelled_in_flight(modal, provider, name="one"):
    """A start whose caller went away while Modal was busy with its create."""
    creates = modal.calls["SandboxCreateV2"]
    task = asyncio.create_task(provider.start(name, SPEC))
    await eventually(lambda: modal.calls["SandboxCreateV2"] > creates)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("end", ["stop", "close"])
async def test_a_create_that_was_cancelled_leaks_nothing(modal, provider, end):
    modal.limits.create_delay_s = 0.5
    await cancelled_in_flight(modal, provider)
    await (provider.stop("one") if end == "stop" else provider.close())
    assert len(modal.sandboxes) == 1
    await nothing_left(modal)


async def test_a_pool_that_is_closed_while_it_starts_hosts_leaks_nothing(modal, make_config):
    modal.limits.create_delay_s = 0.5
    pool = SlotPool.from_config(make_config(min_hosts=0, max_hosts=3, max_starting=3, slots_per_host=1))
    async with pool:
        waiting = [asyncio.create_task(pool.acquire(f"t{n}")) for n in range(3)]
        await eventually(lambda: modal.calls["SandboxCreateV2"] == 3)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    assert len(modal.sandboxes) == 3
    await nothing_left(modal)


async def test_a_create_whose_answer_was_lost_is_adopted_by_its_name(modal, provider):
    lost = modal.faults.lose("SandboxCreateV2", times=4)
    host = await provider.start("one", SPEC)
    assert lost.hits == 4, "the SDK's own retries were meant to fail too"
    assert [sandbox.id for sandbox in modal.sandboxes] == [host.identity]
    assert host.expires_at_s is not None


async def test_a_create_that_takes_too_long_is_found_by_its_name(modal, tmp_path):
    modal.limits.create_delay_s = 1.0
    async with modal_provider(tmp_path, create_timeout_s=0.3) as provider:
        host = await provider.start("one", SPEC)
        assert [sandbox.id for sandbox in modal.sandboxes] == [host.identity]
        await provider.stop("one")


async def test_a_create_that_came_to_life_after_all_hope_is_still_stopped(modal, tmp_path):
    lost = modal.faults.lose("SandboxCreateV2", times=None)
    blind = modal.faults.fail("SandboxGetFromName*", times=None)
    async with modal_provider(tmp_path) as provider:
        with pytest.raises(HostStartFailed):
            await provider.start("one", SPEC)
        with pytest.raises(SandboxError):
            await provider.stop("one")
        for fault in (lost, blind):
            modal.faults.remove(fault)
        assert len(modal.alive) == 1
        await provider.stop("one")
    await nothing_left(modal)


async def test_throttled_creates_end_in_time(modal, tmp_path):
    modal.faults.throttle("SandboxCreateV2", retry_after_s=0.2, times=None)
    async with modal_provider(tmp_path, create_timeout_s=1.0, settle_s=0.1) as provider:
        with pytest.raises(HostStartFailed, match="throttling"):
            await provider.start("one", SPEC)
        await provider.stop("one")
    assert modal.sandboxes == []


async def test_a_workspace_that_is_full_is_said_and_what_there_is_serves_on(modal, make_config):
    modal.limits.max_sandboxes = 1
    config = make_config(slots_per_host=1, max_hosts=2, max_starting=2)
    async with SlotPool.from_config(config) as pool:
        async with pool.lease("first"):
            with pytest.raises(AcquireTimeout):
                await pool.acquire("second", timeout_s=2.0)
            assert "sandbox limit reached" in str(pool._fleet.failures.last)
        async with pool.lease("third") as box:
            assert (await box.exec("echo served")).output == "served\n"


async def test_a_full_workspace_without_any_host_is_a_typed_error(modal, make_config):
    modal.limits.max_sandboxes = 0
    with pytest.raises(HostStartFailed, match="sandbox limit reached"):
        async with SlotPool.from_config(make_config()):
            pass


async def test_a_revoked_token_is_a_typed_error_and_says_how_to_log_in(modal, provider):
    await provider.start("one", SPEC)
    modal.accept_credentials(False)
    with pytest.raises(HostStartFailed, match="modal token new"):
        await provider.start("two", SPEC)
    for refused in (provider.stop("one"), provider.list()):
        with pytest.raises(SandboxError, match="modal token new"):
            await refused
    modal.accept_credentials(True)
    await provider.stop("one")
    await provider.stop("two")
    await nothing_left(modal)


async def test_an_image_that_cannot_be_built_fails_with_the_words_of_its_build(modal, make_config):
    modal.image_failures["FROM broken:1"] = "E: Unable to locate package frobnicate"
    with pytest.raises(HostStartFailed, match="Unable to locate package frobnicate"):
        async with SlotPool.from_config(make_config({"image": "registry:broken:1"})):
            pass
    assert modal.sandboxes == []


@pytest.mark.ci
async def test_a_hundred_tasks_at_once_need_ten_sandboxes_of_ten_slots(modal, make_config):
    modal.limits.create_bucket = TokenBucket(5, 5)
    config = make_config(slots_per_host=10, min_hosts=0, max_hosts=100, max_starting=100, create_interval_s=None)
    async with SlotPool.from_config(config) as pool:
        boxes = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(100)))
        said = await asyncio.gather(*(box.exec("hostname; echo $$") for box in boxes))
        assert all(result.exit_code == 0 for result in said)
        assert len(modal.sandboxes) <= 10
        await asyncio.gather(*(box.release() for box in boxes))


@pytest.mark.parametrize("fault", ["preempt", "forget", "refuses"])
async def test_a_sandbox_that_dies_in_a_rollout_is_lost_and_replaced(modal, make_config, fault):
    async with SlotPool.from_config(make_config(health_interval_s=0.2)) as pool:
        box = await pool.acquire("rollout")
        (sandbox_id,) = modal.alive
        running = await started(box, "sleep 600")
        await (modal.set_reach(sandbox_id, fault) if fault == "refuses" else getattr(modal, fault)(sandbox_id))
        with pytest.raises(SandboxLost):
            await running
        with pytest.raises(SandboxLost):
            await box.exec("echo still here")
        await box.release()
        async with pool.lease("rollout again") as other:
            assert (await other.exec("echo alive")).output == "alive\n"
        assert sandbox_id not in modal.alive
        assert pool.metrics.counts["lost_hosts"] == 1


async def test_a_sandbox_near_its_end_gets_no_more_leases_but_keeps_those_it_has(modal, make_config):
    config = make_config({"timeout_s": 3600, "drain_s": 900}, lease_ttl_s=600, health_interval_s=0.1)
    async with SlotPool.from_config(config) as pool:
        old = await pool.acquire("long task")
        (first,) = modal.alive
        (host,) = pool._fleet.hosts.values()
        host.host = dataclasses.replace(host.host, expires_at_s=time.time() + 890)  # the time that would pass
        await eventually(lambda: len(modal.alive) == 2, timeout_s=60)
        async with pool.lease("next task") as new:
            assert new.endpoint.name != old.endpoint.name
            assert (await old.exec("echo undisturbed")).output == "undisturbed\n"
        await old.release()
        await eventually(lambda: first not in modal.alive)
        assert pool.metrics.counts["lost_hosts"] == 0


async def test_a_sandbox_that_ends_before_a_lease_may_is_refused_instead_of_replaced_for_ever(modal, make_config):
    with pytest.raises(HostStartFailed, match="before a lease on it can finish"):
        async with SlotPool.from_config(make_config({"timeout_s": 600, "drain_s": 0}, lease_ttl_s=600)):
            pass
    assert len(modal.sandboxes) == 1


@contextlib.contextmanager
def client_program(config, path, leases):
    """Another process that keeps leases busy until it is killed."""
    path.write_text(config.model_dump_json())
    process = subprocess.Popen(
        [sys.executable, pool_program.__file__, str(path), str(leases)], stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def killed_client(config, path, leases=3):
    with client_program(config, path, leases) as process:
        assert await asyncio.to_thread(process.stdout.readline) == "busy\n"
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)


@pytest.mark.parametrize("journal", ["kept", "lost"])
async def test_what_a_killed_client_left_is_found_and_swept(modal, make_config, tmp_path, capsys, journal):
    await killed_client(make_config(max_hosts=2), tmp_path / "config.json")
    assert len(modal.alive) == 2
    state_dir = tmp_path / ("state" if journal == "kept" else "empty")
    flags = ("--provider", "modal") if journal == "lost" else ()
    code = await asyncio.to_thread(run_verb, "pool", "gc", "--json", "--state-dir", str(state_dir), *flags)
    report = json.loads(capsys.readouterr().out)
    there = [action for action in report["actions"] if action["provider"] == "modal"]
    assert (code, report["left"], len(there)) == (0, 0, 2)
    await nothing_left(modal)


async def test_a_new_pool_takes_over_what_a_killed_client_left_running(modal, make_config, tmp_path):
    await killed_client(make_config(), tmp_path / "config.json", leases=2)
    (left,) = modal.alive
    async with SlotPool.from_config(make_config()) as pool:
        async with pool.lease("t") as box:
            assert (await box.exec("cat f")).exit_code != 0
        assert pool.metrics.counts["hosts_adopted"] == 1
        assert modal.alive == [left]


async def test_hosts_of_clients_that_live_are_left_alone(modal, make_config, tmp_path):
    with client_program(make_config(), tmp_path / "config.json", 1) as process:
        assert await asyncio.to_thread(process.stdout.readline) == "busy\n"
        journal = Journal(tmp_path / "empty")
        report = await collect_orphans(journal, tmp_path / "empty", this_process(), places=[default_place("modal")])
        journal.close()
        assert [action for action in report.actions if action.provider == "modal"] == []
        assert len(modal.alive) == 1
        os.kill(process.pid, signal.SIGTERM)
        await asyncio.to_thread(process.wait)
    await nothing_left(modal)


async def test_an_image_is_built_once_before_the_pool_fills(modal, make_config):
    modal.limits.image_build_s = 0.5
    config = make_config({"image": "python:3.12-slim"}, slots_per_host=1, min_hosts=3, max_hosts=3, max_starting=3)
    async with SlotPool.from_config(config) as pool:
        boxes = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(3)))
        await asyncio.gather(*(box.release() for box in boxes))
    assert len(modal.sandboxes) == 3
    assert {image.builds for image in modal.images} == {1}
