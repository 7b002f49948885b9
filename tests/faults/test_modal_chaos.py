"""Operations on an emulated Modal where anything can go wrong at any time: nothing leaks, hangs, or fails untyped."""

import asyncio
import collections
import random

import pytest
from grpclib import Status

from sandbox_pool import SandboxError, SlotPool
from sandbox_pool.journal.gc import collect_orphans
from sandbox_pool.journal.journal import Journal
from sandbox_pool.journal.owner import this_process
from support.modal_place import emulated_modal, modal_config, nothing_left

AT_ONCE = 8
HANGS_S = 100.0
"""No operation may take longer, all its bounded waits taken together."""
SETTLE_S = 20.0
"""By then nothing that the pool began may be going on."""
OPTIONS = {"create_timeout_s": 4.0, "ready_timeout_s": 15.0, "stop_timeout_s": 4.0, "api_timeout_s": 4.0}
POOL = {
    "slots_per_host": 3,
    "max_hosts": 4,
    "min_hosts": 0,
    "max_starting": 3,
    "start_attempts": 3,
    "acquire_timeout_s": 40.0,
    "health_interval_s": 0.3,
    "health_timeout_s": 1.0,
    "lost_after_s": 3.0,
    "reset_timeout_s": 5.0,
    "start_timeout_s": 30.0,
}


def let_calls_fail(modal):
    """Of all calls to the control plane some are refused, some lose their answer, some are late or throttled."""
    for rpc in ("SandboxCreateV2", "SandboxGetFromName*", "SandboxTerminateV2", "SandboxWaitV2", "SandboxTags*"):
        modal.faults.fail(rpc, Status.UNAVAILABLE, times=None, probability=0.15)
        modal.faults.lose(rpc, times=None, probability=0.15)
        modal.faults.fail(rpc, Status.INTERNAL, times=None, probability=0.03)
    modal.faults.throttle("SandboxCreateV2", 0.3, times=None, probability=0.1)
    modal.faults.delay("SandboxCreateV2", after_s=6.0, probability=0.05)
    modal.faults.delay("Sandbox*", before_s=0.2, probability=0.1)


async def break_sandboxes(modal, dice, finished):
    """A little after each operation that went well a worker dies, is cut off, or the account is refused for a while."""
    while True:
        await finished.acquire()
        await asyncio.sleep(dice.uniform(0, 0.5))
        kind = dice.choice(["preempt", "forget", "cut", "refuses", "hangs", "credentials", "capacity"])
        if kind == "credentials":
            modal.accept_credentials(False)
            await asyncio.sleep(0.3)
            modal.accept_credentials(True)
        elif kind == "capacity":
            modal.limits.max_sandboxes = len(modal.alive)
            await asyncio.sleep(0.5)
            modal.limits.max_sandboxes = None
        elif modal.alive:
            victim = dice.choice(modal.alive)
            strokes = {"preempt": modal.preempt, "forget": modal.forget, "cut": modal.cut_tunnels}
            try:
                await (strokes[kind](victim) if kind in strokes else modal.set_reach(victim, kind))
            except KeyError:
                continue  # it ended by itself meanwhile


async def operation(pool, number, dice):
    """A task's way with a sandbox; some are cancelled somewhere on it."""
    async with pool.lease(f"op-{number}") as box:
        for turn in range(4):
            result = await box.exec(f"echo {number} {turn} | tee f; sleep {dice.uniform(0, 0.5):.2f}", timeout_s=20)
            assert result.output == f"{number} {turn}\n", result
        await box.write_file("g", b"x" * 100_000)
        assert await box.read_file("g") == b"x" * 100_000


async def one(pool, number, dice, outcomes, finished):
    task = asyncio.create_task(operation(pool, number, dice))
    cancelled = dice.random() < 0.15
    try:
        async with asyncio.timeout(HANGS_S):
            if cancelled:
                await asyncio.wait({task}, timeout=dice.uniform(0, 1.5))
                task.cancel()
            await task
    except asyncio.CancelledError:
        assert cancelled
        outcomes["cancelled"] += 1
    except SandboxError as error:
        outcomes[type(error).__name__] += 1
    else:
        outcomes["done"] += 1
        finished.release()


def others():
    """Tasks of this loop besides the test's own."""
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize(
    ("operations", "path"),
    [
        pytest.param(40, "tunnel", marks=pytest.mark.ci),
        pytest.param(500, "tunnel", marks=pytest.mark.slow),
        pytest.param(500, "exec", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(1800)
async def test_under_random_faults_nothing_leaks_nothing_hangs_and_every_failure_is_typed(tmp_path, operations, path):
    dice, outcomes, gate = random.Random(operations), collections.Counter(), asyncio.Semaphore(AT_ONCE)
    finished = asyncio.Semaphore(0)
    async with emulated_modal(seed=operations) as modal:
        let_calls_fail(modal)
        async with SlotPool.from_config(modal_config(tmp_path, {**OPTIONS, "data_path": path}, **POOL)) as pool:
            breaking = asyncio.create_task(break_sandboxes(modal, dice, finished))

            async def gated(number):
                async with gate:
                    await one(pool, number, random.Random(number), outcomes, finished)

            await asyncio.gather(*map(gated, range(operations)))
            breaking.cancel()
            await asyncio.wait({breaking})
            modal.faults.clear()
            modal.accept_credentials(True)
            modal.limits.max_sandboxes = None
        journal = Journal(tmp_path)
        report = await collect_orphans(journal, tmp_path, this_process())
        assert report.left == 0, [action.text() for action in report.actions]
        journal.close()
        await nothing_left(modal)
        if others():
            await asyncio.wait(others(), timeout=SETTLE_S)
        assert others() == set()
        print(dict(outcomes), "sandboxes", len(modal.sandboxes), "collected", len(report.actions))
    assert sum(outcomes.values()) == operations
    assert outcomes["done"] > operations / 10
