"""An agent that attacks in every way we know, through whole rollouts: none is lost, none is paid, nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent_loop.local_models.standin import Policy
from agent_loop.local_models.standin.policies import good, saboteur
from environments.code_tasks.code_env import CodeTasksConfig, CodeTasksEnv
from environments.terminal_tasks.terminal_env import TerminalTasksConfig, TerminalTasksEnv
from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from support.env_tasks import standin_model
from support.pool_wait import eventually

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="without cgroups the limit of processes is the user's: tests beside a bomb would starve"
)

SPEC = SandboxSpec(memory_mb=256, disk_mb=128, pids=128, cpu=0.25)
GROUP = 4


@asynccontextmanager
async def opened(tmp_path: Path) -> AsyncIterator[SlotPool]:
    """A pool of its own scratch space, which must be empty when it is closed."""
    scratch = tmp_path / "scratch"
    scratch.mkdir(parents=True)
    config = PoolConfig(slots_per_host=GROUP + 1, max_hosts=1, state_dir=tmp_path / "state", scratch_dir=scratch)
    async with SlotPool.from_config(config) as pool:
        yield pool
    assert [str(path) for path in scratch.glob("*/*")] == []
    await eventually(lambda: processes_of(str(scratch)) == [])


def processes_of(mark: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and entry.name != str(os.getpid()):
            with contextlib.suppress(OSError):
                if mark.encode() in (entry / "environ").read_bytes() or mark in str((entry / "cwd").readlink()):
                    found.append((entry / "cmdline").read_text())
    return found


def environments(pool: SlotPool, model: Any, **more: Any) -> list[Any]:
    settings = {"group_size": GROUP, "rollout_tries": 1, "max_token_length": 1 << 15, "sandbox": SPEC, **more}
    settings |= {"max_agent_turns": 6, "terminal_timeout": 20.0}
    return [
        TerminalTasksEnv(TerminalTasksConfig(**settings), pool=pool, model=model),
        CodeTasksEnv(CodeTasksConfig(**settings), pool=pool, model=model),
    ]


async def play(pool: SlotPool, policy: Policy, groups: int, seed: int = 0) -> list[Any]:
    records = []
    async with standin_model(policy, seed=seed) as (model, _):
        modes = ("workspace", "layer")
        kinds = [env for mode in modes for env in environments(pool, model, verification=mode, seed=seed)]
        for env in kinds:
            await env.setup()
        for number in range(groups):
            env = kinds[number % len(kinds)]
            records += (await env.rollouts.run_group(await env.get_next_item(), number, GROUP)).records()
    return records


def judge(records: list[Any]) -> None:
    assert [(r.outcome, r.error) for r in records if not r.trainable] == []
    assert [(r.task_id, r.verifier_score) for r in records if r.verifier_score != 0.0] == []


@pytest.mark.ci
async def test_sabotage_is_neither_lost_nor_paid_and_leaves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as pool:
        judge(await play(pool, saboteur, groups=2))


async def latency(pool: SlotPool, while_: asyncio.Task[Any]) -> float:
    """Median time of a command in a slot of somebody else."""
    taken = []
    async with pool.lease("neighbour", SPEC) as neighbour:
        while not while_.done():
            began = time.perf_counter()
            assert (await neighbour.exec("echo here", timeout_s=60)).output == "here\n"
            taken.append(time.perf_counter() - began)
            await asyncio.sleep(0.02)
    return statistics.median(taken)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.geteuid() != 0, reason="without cgroups nothing shares out the processor")
async def test_200_rollouts_of_sabotage_slow_no_neighbour_by_more_than_twice(tmp_path: Path) -> None:
    """Against the same number of rollouts that behave."""
    medians = []
    for name, policy in (("good", good), ("bad", saboteur)):
        async with opened(tmp_path / name) as pool:
            playing = asyncio.create_task(play(pool, policy, groups=200 // GROUP if policy is saboteur else 8))
            medians.append(await latency(pool, playing))
            records = await playing
    print(f"{len(records)} rollouts; neighbour's median {medians[0] * 1000:.1f} -> {medians[1] * 1000:.1f} ms")
    judge(records)
    assert medians[1] <= 2 * medians[0]
