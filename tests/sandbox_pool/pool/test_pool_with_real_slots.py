"""The pool over the real slot server: what only the whole of it can show."""

import asyncio
import os
import signal

import pytest

from sandbox_pool import IsolationUnavailable, PoolConfig, SandboxLost, SandboxSpec, SlotPool, StaleLease
from sandbox_pool.journal.journal import Journal
from support.pool_wait import eventually, started


@pytest.fixture
def config(tmp_path):
    def make(**fields):
        return PoolConfig(
            **{"slots_per_host": 4, "max_hosts": 1, "state_dir": tmp_path / "state", "scratch_dir": tmp_path / "s"}
            | fields
        )

    return make


async def test_a_command_without_a_timeout_gets_the_pools(config):
    async with SlotPool.from_config(config(exec_timeout_s=0.2)) as pool, pool.lease("t") as sandbox:
        assert (await sandbox.exec("sleep 60")).timed_out
        assert not (await sandbox.exec("sleep 0.4", timeout_s=60)).timed_out


async def test_the_example_of_the_documentation(config, tmp_path):
    (tmp_path / "local").write_text("local file")
    async with SlotPool.from_config(config()) as pool:
        async with pool.lease("task-1", SandboxSpec(network="none")) as sandbox:
            result = await sandbox.exec("echo made > made; cat made", timeout_s=60)
            assert (result.exit_code, result.output, result.timed_out) == (0, "made\n", False)
            await sandbox.write_file("a.py", b"print(1)")
            assert await sandbox.read_file("a.py") == b"print(1)"
            await sandbox.upload(tmp_path / "local", "dir/")
            await sandbox.download("dir", tmp_path / "back")
            assert (tmp_path / "back" / "local").read_text() == "local file"
            process = await sandbox.spawn("sleep 60", pty=False)
            snapshot = await sandbox.snapshot()
            copy = await pool.lease_from(snapshot, "task-2")
            assert (await copy.exec("ls")).output == "a.py\ndir\nmade\n"
            await copy.release()
            assert await process.poll() is None
        assert pool.metrics.summary()["exec_ms"]["count"] == 2


async def test_a_killed_server_is_sandbox_lost_and_replaced(config):
    async with SlotPool.from_config(config()) as pool:
        lease = await pool.acquire("t")
        running = await started(lease, "sleep 60")
        os.kill(lease.host_info.pid, signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await running
        with pytest.raises(SandboxLost):
            await lease.exec("echo hi")
        await lease.release()
        async with pool.lease("next", timeout_s=30) as box:
            assert (await box.exec("echo back")).output == "back\n"


async def test_a_taken_back_lease_is_stale_for_its_holder(config):
    async with SlotPool.from_config(config(slots_per_host=1)) as pool:
        lease = await pool.acquire("slow", ttl_s=0.2)
        async with pool.lease("next", timeout_s=30) as box:
            await box.exec("echo mine > f")
            with pytest.raises(StaleLease):
                await lease.exec("rm -f f")
            with pytest.raises(StaleLease):
                await lease.write_file("f", b"stolen")
            assert (await box.exec("cat f")).output == "mine\n"


async def test_too_little_isolation_refuses_to_start(config):
    weak = config(min_isolation="namespaces", provider_options={"level": "plain"})
    with pytest.raises(IsolationUnavailable):
        async with SlotPool.from_config(weak):
            pass
    assert not any((weak.scratch_dir).rglob("host.json"))


async def test_leases_show_in_the_journal(config):
    settings = config()
    async with SlotPool.from_config(settings) as pool, pool.lease("shown"):
        journal = Journal(settings.resolved_state_dir())
        await eventually(lambda: [lease.task_id for lease in journal.leases()] == ["shown"])
        (host,) = journal.hosts()
        assert (host.state, host.slots) == ("running", 4)
        journal.close()


async def test_a_second_host_serves_when_the_first_is_full(config):
    async with SlotPool.from_config(config(slots_per_host=1, max_hosts=2, create_interval_s=0)) as pool:
        one, two = await asyncio.gather(pool.acquire("one"), pool.acquire("two", timeout_s=30))
        assert one.host != two.host
        outputs = await asyncio.gather(one.exec("echo 1"), two.exec("echo 2"))
        assert [result.output for result in outputs] == ["1\n", "2\n"]


async def test_a_fork_on_another_host_has_the_files(config):
    async with SlotPool.from_config(config(slots_per_host=1, max_hosts=2, create_interval_s=0)) as pool:
        maker = await pool.acquire("maker")
        await maker.exec("mkdir d; echo kept > d/f; ln -s d/f l")
        snapshot = await maker.snapshot()
        async with pool.lease_from(snapshot, "fork", timeout_s=30) as fork:
            assert fork.host != maker.host
            assert (await fork.exec("cat l")).output == "kept\n"


async def test_two_pools_in_one_process_do_not_interfere(config):
    settings = config()
    async with SlotPool.from_config(settings) as one, SlotPool.from_config(settings) as two:
        async with one.lease("a") as a, two.lease("b") as b:
            assert a.host != b.host
        await two.close()
        async with one.lease("still") as box:
            assert (await box.exec("echo here")).output == "here\n"


async def test_a_lease_that_nobody_uses_is_taken_back(config):
    async with SlotPool.from_config(config(slots_per_host=1, lease_idle_s=0.3)) as pool:
        lease = await pool.acquire("rests")
        assert (await lease.exec("sleep 1; echo used")).output == "used\n", "a long command is no rest"
        process = await lease.spawn("sleep 1")
        assert await process.wait() == 0, "nor is a process"
        async with pool.lease("next", timeout_s=60):
            with pytest.raises(StaleLease):
                await lease.exec("echo late")
        assert pool.metrics.counts["expired_leases"] == 1


async def test_a_process_in_the_background_keeps_a_lease(config):
    async with SlotPool.from_config(config(slots_per_host=1, lease_idle_s=0.1)) as pool:
        lease = await pool.acquire("works")
        process = await lease.spawn("sleep 100")
        await asyncio.sleep(0.5)
        assert await process.poll() is None
        await process.kill()
        async with pool.lease("next", timeout_s=60):
            pass
