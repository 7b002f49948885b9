"""What clusters do to a pool: allocations stopped, jobs purged, agents killed, no room, answers lost, old tokens."""

import asyncio
import json
import signal
import subprocess
import sys
import urllib.parse

import pytest

from sandbox_pool import HostStartFailed, SandboxLost, SlotPool
from sandbox_pool.journal.journal import Journal
from support import pool_program
from support.cli_verb import run_verb
from support.lossy_proxy import LossyProxy
from support.pool_wait import eventually, started

pytestmark = pytest.mark.timeout(120)


async def expect_lost(box, running, timeout_s=20):
    """A command under way and every later one end as lost, in time."""
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(running, timeout_s)
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(box.exec("true"), timeout_s)


async def busy(pool):
    box = await pool.acquire("victim")
    running = await started(box, "sleep 600")
    assert not running.done()
    return box, running


async def still_serves(pool, not_on=None):
    async with pool.lease("next", timeout_s=40) as box:
        assert (await box.exec("echo on")).output == "on\n"
        assert box.endpoint.identity != not_on
        return box.endpoint.identity


async def test_a_lease_ends_as_lost_when_its_allocation_is_stopped_from_outside(make_config, agent, cluster):
    async with SlotPool.from_config(make_config()) as pool:
        box, running = await busy(pool)
        victim = box.endpoint.identity
        await cluster(agent.call, "PUT", f"/v1/allocation/{victim}/stop")
        await expect_lost(box, running)
        await box.release()
        assert await still_serves(pool) != victim


@pytest.mark.parametrize("what", ["the host's own job", "the job of all hosts"])
async def test_a_purged_job_costs_its_leases_and_nothing_more(make_config, agent, cluster, what):
    async with SlotPool.from_config(make_config()) as pool:
        box, running = await busy(pool)
        (child,) = await cluster(agent.children)
        job = child if what == "the host's own job" else child.partition("/")[0]
        await cluster(agent.call, "DELETE", f"/v1/job/{urllib.parse.quote(job, safe='')}", purge="true")
        if what == "the host's own job":
            await expect_lost(box, running)
        else:
            assert (await box.exec("echo unharmed")).output == "unharmed\n"
            await cluster(agent.call, "PUT", f"/v1/allocation/{box.endpoint.identity}/stop")
            await expect_lost(box, running)
        await box.release()
        await still_serves(pool, not_on=box.endpoint.identity)


@pytest.mark.slow
async def test_leases_outlive_the_agent_and_its_restart(make_config, agent, cluster):
    async with SlotPool.from_config(make_config(max_hosts=2)) as pool, pool.lease("t") as box:
        await box.write_file("kept", b"before")
        agent.kill()
        assert (await box.exec("cat kept; echo during")).output == "beforeduring\n"
        await cluster(agent.restart)
        assert (await box.exec("cat kept; echo after")).output == "beforeafter\n"
        others = await asyncio.gather(*(pool.acquire(f"more-{n}", timeout_s=60) for n in range(4)))
        assert {other.endpoint.identity for other in others} > {box.endpoint.identity}
        for other in others:
            await other.release()


async def test_a_full_cluster_is_a_clear_error_that_names_the_resource(make_config):
    config = make_config({"memory_mb": 64000, "blocked_timeout_s": 1.0}, min_hosts=0)
    async with SlotPool.from_config(config) as pool:
        with pytest.raises(HostStartFailed, match=r"no room .*memory is exhausted on 1 node"):
            await pool.acquire("t", timeout_s=60)


async def test_hosts_that_fit_serve_while_others_have_no_room(make_config):
    config = make_config({"memory_mb": 9000, "blocked_timeout_s": 1.0}, slots_per_host=1, max_hosts=2)
    async with SlotPool.from_config(config) as pool:
        first = await pool.acquire("first")
        second = asyncio.create_task(pool.acquire("second", timeout_s=60))
        await eventually(lambda: pool.metrics.counts["start_failures"] >= 1, 30)
        await first.release()
        box = await second
        assert (await box.exec("echo served")).output == "served\n"
        await box.release()


async def test_a_constraint_that_no_node_meets_is_named(make_config):
    config = make_config({"constraints": ["${attr.kernel.name} = plan9"], "blocked_timeout_s": 0.5}, min_hosts=0)
    async with SlotPool.from_config(config) as pool:
        with pytest.raises(HostStartFailed, match="plan9"):
            await pool.acquire("t", timeout_s=60)


async def test_scales_from_nothing_to_eight_hosts_and_back(make_config, agent, cluster):
    config = make_config(slots_per_host=1, min_hosts=0, max_hosts=8, max_starting=4, idle_s=0.5)
    async with SlotPool.from_config(config) as pool:
        assert await cluster(agent.children) == []
        boxes = await asyncio.gather(*(pool.acquire(f"t{n}", timeout_s=90) for n in range(8)))
        assert len({box.endpoint.identity for box in boxes}) == 8
        outputs = await asyncio.gather(*(box.exec(f"echo {n}") for n, box in enumerate(boxes)))
        assert [done.output for done in outputs] == [f"{n}\n" for n in range(8)]
        await asyncio.gather(*(box.release() for box in boxes))
        await eventually(lambda: pool.metrics.counts["hosts_stopped"] == 8, 60)
        assert pool.status().hosts == ()


def test_what_a_killed_client_left_is_swept(make_config, agent, tmp_path, capsys):
    config = make_config()
    (tmp_path / "pool.json").write_text(config.model_dump_json())
    command = [sys.executable, pool_program.__file__, str(tmp_path / "pool.json"), "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline() == "busy\n"
        assert len(agent.children()) == 1
        client.send_signal(signal.SIGKILL)
    assert run_verb("pool", "gc", "--json", "--state-dir", str(tmp_path / "state")) == 0
    report = json.loads(capsys.readouterr().out)
    assert [action["done"] for action in report["actions"]] == ["destroyed"]
    assert agent.children() == []
    assert agent.processes() == []


def test_without_a_journal_the_sweep_finds_hosts_by_their_labels(make_config, agent, tmp_path, capsys, monkeypatch):
    (tmp_path / "pool.json").write_text(make_config().model_dump_json())
    command = [sys.executable, pool_program.__file__, str(tmp_path / "pool.json"), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline() == "busy\n"
        client.send_signal(signal.SIGKILL)
    monkeypatch.setenv("NOMAD_ADDR", agent.address)
    monkeypatch.setenv("NOMAD_TOKEN", agent.pool_secret)
    assert run_verb("pool", "gc", "--json", "--state-dir", str(tmp_path / "other"), "--provider", "nomad") == 0
    report = json.loads(capsys.readouterr().out)
    assert [action["done"] for action in report["actions"]] == ["destroyed"]


@pytest.mark.slow
def test_a_host_whose_client_never_comes_back_ends_itself(make_config, agent, tmp_path):
    (tmp_path / "pool.json").write_text(make_config(owner_ttl_s=2.0).model_dump_json())
    command = [sys.executable, pool_program.__file__, str(tmp_path / "pool.json"), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout.readline() == "busy\n"
        client.send_signal(signal.SIGKILL)
    asyncio.run(eventually(lambda: not agent.processes() and not agent.running(), 20))
    assert run_verb("pool", "gc", "--state-dir", str(tmp_path / "state")) == 0


async def test_a_new_pool_takes_over_what_a_killed_one_left_running(make_config, agent, cluster, tmp_path):
    config = make_config()
    (tmp_path / "pool.json").write_text(config.model_dump_json())
    command = [sys.executable, pool_program.__file__, str(tmp_path / "pool.json"), "2"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert await process.stdout.readline() == b"busy\n"
    before = await cluster(agent.children)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    async with SlotPool.from_config(config) as pool:
        async with pool.lease("heir") as box:
            assert (await box.exec("ls; echo clean")).output == "clean\n"
        assert pool.metrics.counts["hosts_adopted"] == 1
        assert await cluster(agent.children) == before


async def test_a_dispatch_whose_answer_was_lost_is_adopted_not_doubled(make_config, agent, cluster):
    async with LossyProxy(agent.address) as proxy:
        proxy.lose_answers_to("/dispatch", 2)
        async with SlotPool.from_config(make_config({"address": proxy.address})) as pool:
            await still_serves(pool)
            assert proxy.lost == 2
            assert len(await cluster(agent.children)) == 1


async def test_a_dispatch_that_never_gets_an_answer_leaves_nothing(make_config, agent, cluster, tmp_path):
    async with LossyProxy(agent.address) as proxy:
        options = {"address": proxy.address, "api_timeout_s": 1.0}
        proxy.lose_answers_to("/dispatch", 10**6)
        async with SlotPool.from_config(make_config(options, min_hosts=0)) as pool:
            with pytest.raises(HostStartFailed, match="does not answer"):
                await pool.acquire("t", timeout_s=30)
            assert len(await cluster(agent.children)) == 1
            proxy.relent()
        assert proxy.lost >= 2
    assert await cluster(agent.children) == []
    assert Journal(tmp_path / "state").hosts() == []


async def test_an_expired_token_ends_no_lease_and_is_named(make_config, agent, cluster, tmp_path):
    config = make_config(slots_per_host=1, max_hosts=2)
    async with SlotPool.from_config(config) as pool:
        box = await pool.acquire("t")
        short = await cluster(agent.pool_token, "1s")
        (tmp_path / "nomad.acl").write_text(short)
        await asyncio.sleep(1.5)
        assert (await box.exec("echo on")).output == "on\n"
        await pool_refuses(pool)
        (tmp_path / "nomad.acl").write_text(agent.pool_secret)
        await box.release()


async def pool_refuses(pool):
    """No second host can be had: the reason is in the pool's status while the first goes on."""
    waiting = asyncio.create_task(pool.acquire("more", timeout_s=20))
    await eventually(lambda: pool.metrics.counts["start_failures"] >= 1, 20)
    waiting.cancel()
    shown = " ".join(str(error) for error in pool._fleet.failures.last.values())
    assert "403" in shown
    assert "ACL token" in shown
