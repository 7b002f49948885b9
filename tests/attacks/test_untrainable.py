"""An agent cannot make its own failing rollout untrainable, whatever it destroys."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent_loop.local_models.standin import PolicyRequest
from agent_loop.local_models.standin.policies import call, sabotage
from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from support.env_tasks import NumberEnv, standin_model

SABOTAGE = sabotage()
ACTS = [*SABOTAGE["workspace"], *SABOTAGE["trees"], *SABOTAGE["shell"], "kill -9 -1"]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[SlotPool]:
    async with SlotPool.from_config(PoolConfig(slots_per_host=2, max_hosts=1, state_dir=tmp_path / "state")) as opened:
        yield opened


async def outcome_of(pool: SlotPool, commands: list[str], **config: Any) -> Any:
    class Reading(NumberEnv):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float((await ctx.read_file("answer.txt")).strip() == b"7")

    def destroy(request: PolicyRequest) -> str:
        done = request.results
        return call("terminal", {"command": commands[done]}) if done < len(commands) else "Done."

    async with standin_model(destroy) as (model, _):
        env = Reading(pool, model, rollout_tries=1, max_agent_turns=len(commands) + 1, **config)
        [record] = (await env.rollouts.run_group({"id": "x", "number": 7}, 0, 1)).records()
    return record


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(st.sampled_from(ACTS), min_size=1, max_size=4), layer=st.booleans())
async def test_random_destruction_is_never_untrainable(pool: SlotPool, acts: list[str], layer: bool) -> None:
    record = await outcome_of(pool, acts, verification="layer" if layer else "workspace")
    assert record.trainable, (record.outcome, record.error)
    assert record.verifier_score == 0.0


@pytest.mark.parametrize("act", ACTS)
async def test_each_destruction_alone_is_never_untrainable(pool: SlotPool, act: str) -> None:
    record = await outcome_of(pool, [act])
    assert record.trainable, (record.outcome, record.error)
    assert record.verifier_score == 0.0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a memory cgroup")
async def test_filling_the_memory_of_the_slot_is_never_untrainable(pool: SlotPool) -> None:
    fill = ["for i in 1 2 3 4; do head -c 60M /dev/zero > /dev/shm/$i & done; wait", "head -c 99M /dev/zero | tail"]
    record = await outcome_of(pool, fill, sandbox=SandboxSpec(memory_mb=64))
    assert record.trainable, (record.outcome, record.error)
    assert record.verifier_score == 0.0
