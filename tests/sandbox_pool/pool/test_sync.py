"""One pool used from plain threads and from several event loops, with real slots."""

import asyncio
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sandbox_pool import PoolConfig, SandboxFileError, SandboxSpec, SlotPool
from sandbox_pool.pool import sync
from support.pool_wait import eventually


@pytest.fixture
def config(tmp_path):
    return PoolConfig(slots_per_host=4, max_hosts=1, state_dir=tmp_path / "state", scratch_dir=tmp_path / "s")


def test_the_example_of_the_module_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    example = [line for line in sync.__doc__.splitlines() if line.startswith("    ") or not line]
    names = {}
    exec(textwrap.dedent("\n".join(example)), names)
    assert names["outputs"] == [f"{number}\n" for number in range(24)]


def test_a_script_needs_no_event_loop(config):
    with SlotPool.sync(config) as pool:
        with pool.lease("t", SandboxSpec(env={"A": "1"})) as box:
            assert box.exec("echo $A").output == "1\n"
            box.write_file("f", b"x")
            assert box.read_file("f") == b"x"
            process = box.spawn("exit 4")
            assert process.wait() == 4
            snapshot = box.snapshot()
        with pool.lease_from(snapshot, "fork") as fork:
            assert fork.read_file("f") == b"x"
        pool.drop_snapshot(snapshot)
        assert pool.status().waiting == 0
    pool.close()


def test_errors_reach_the_script_as_themselves(config):
    with SlotPool.sync(config) as pool, pool.lease("t") as box, pytest.raises(SandboxFileError):
        box.read_file("missing")


def test_a_pool_that_is_not_running_says_so(config):
    with pytest.raises(RuntimeError, match="not running"):
        SlotPool.sync(config).lease("t")


def test_many_threads_share_one_pool(config):
    def work(n):
        with pool.lease(f"t{n}") as box:
            return box.exec(f"echo {n} > f; cat f; ls | wc -l").output

    with SlotPool.sync(config) as pool, ThreadPoolExecutor(8) as threads:
        outputs = list(threads.map(work, range(24)))
    assert outputs == [f"{n}\n1\n" for n in range(24)]


async def test_several_event_loops_share_one_pool(config):
    results, errors = [], []

    def other_loop(pool, number):
        async def work(n):
            async with pool.lease(f"{number}-{n}") as box:
                result = await box.exec(f"echo {number}-{n}")
                results.append(result.output.strip())

        async def all_of_them():
            await asyncio.gather(*(work(n) for n in range(6)))

        try:
            asyncio.run(all_of_them())
        except Exception as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    async with SlotPool.from_config(config) as pool:
        threads = [threading.Thread(target=other_loop, args=(pool, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        async with pool.lease("home") as box:
            assert (await box.exec("echo home")).output == "home\n"
        for thread in threads:
            await asyncio.to_thread(thread.join, 60)
        assert errors == []
        assert sorted(results) == sorted(f"{number}-{n}" for number in range(3) for n in range(6))
        assert pool.status().hosts[0].free == 4


async def test_a_task_cancelled_in_another_loop_gives_its_slot_back(config):
    async with SlotPool.from_config(config) as pool:
        held = [await pool.acquire(f"held-{n}") for n in range(4)]

        def other_loop():
            async def wait_and_give_up():
                task = asyncio.create_task(pool.acquire("waiter"))
                await eventually(lambda: pool.status().waiting == 1)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

            asyncio.run(wait_and_give_up())

        await asyncio.to_thread(other_loop)
        for lease in held:
            await lease.release()
        assert pool.status().hosts[0].free == 4
        assert pool.status().waiting == 0
