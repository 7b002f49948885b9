"""`prepare` in real slots: hosts that only it may reach, and what it made kept for later groups and processes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from agent_loop.local_models.standin import PolicyRequest
from agent_loop.local_models.standin.policies import call
from environments.base import SandboxContext
from environments.rollouts.planning import prepared_key
from sandbox_pool import PoolConfig, SlotPool
from sandbox_pool.pool.kept_snapshots import KeptSnapshots
from sandbox_pool.spec import NetworkRules, SandboxSpec
from support.env_tasks import NumberEnv, standin_model

ITEM = {"id": "x", "number": 7}


class PreparedEnv(NumberEnv):
    """The answer is laid out by `prepare`, which counts how often it ran."""

    prepared = 0

    async def prepare(self, item: dict[str, Any], ctx: SandboxContext) -> None:
        type(self).prepared += 1
        await ctx.exec(f"echo {item['number']} >prepared; mkdir -p /opt/made; echo deep >/opt/made/file")
        await ctx.exec("curl -sS --max-time 5 http://in-prepare.invalid/")


def copies(request: PolicyRequest) -> str:
    if request.results:
        return "Done."
    return call(
        "terminal",
        {"command": "cat prepared >answer.txt; cat /opt/made/file; curl -sS http://in-rollout.invalid/; true"},
    )


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PoolConfig:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return PoolConfig(max_hosts=1, slots_per_host=4)


RULES = SandboxSpec(network=NetworkRules(allow=(), prepare=("in-prepare.invalid",)))


async def test_hosts_are_recorded_with_the_phase_that_asked(config: PoolConfig) -> None:
    async with SlotPool.from_config(config) as pool, standin_model(copies) as (model, _):
        async with pool.lease("level") as sandbox:
            if sandbox.isolation != "namespaces":
                pytest.skip("slots have no network of their own here")
        result = await PreparedEnv(pool, model, sandbox=RULES).rollouts.run_group(ITEM, 0, 2)
    assert result.complete
    for record in result.records():
        asked = {(entry["phase"], entry["host"], entry["reason"]) for entry in record.network}
        # No name server knows a name below .invalid: that it was asked shows that the list allowed it.
        assert asked == {
            ("prepare", "in-prepare.invalid", "unknown name"),
            ("rollout", "in-rollout.invalid", "not allowed"),
        }


async def test_what_was_prepared_serves_later_groups_and_other_pools(config: PoolConfig) -> None:
    PreparedEnv.prepared = 0
    kept = KeptSnapshots(config.resolved_state_dir(), 64)
    for _ in range(2):
        async with SlotPool.from_config(config) as pool, standin_model(copies) as (model, _):
            env = PreparedEnv(pool, model, prepare_cache_mb=64)
            for _ in range(2):
                result = await env.rollouts.run_group(ITEM, 0, 2)
                assert [rollout.record.verifier_score for rollout in result.scored] == [1.0, 1.0]
                assert "deep" in str(result.scored[0].record.messages)
    assert PreparedEnv.prepared == 1
    assert len(kept.sizes()) == 1


async def test_another_item_and_another_slot_are_prepared_anew(config: PoolConfig) -> None:
    PreparedEnv.prepared = 0
    async with SlotPool.from_config(config) as pool, standin_model(copies) as (model, _):
        for item, spec in ((ITEM, SandboxSpec()), (ITEM | {"number": 8}, SandboxSpec()), (ITEM, SandboxSpec(pids=99))):
            env = PreparedEnv(pool, model, prepare_cache_mb=64, sandbox=spec)
            result = await env.rollouts.run_group(item, 0, 1)
            assert result.scored[0].record.verifier_score == 1.0
    assert PreparedEnv.prepared == 3
    assert len(KeptSnapshots(config.resolved_state_dir(), 64).sizes()) == 3


def test_the_key_changes_with_the_code_and_the_files(config: PoolConfig, tmp_path: Path) -> None:
    def key(code: str, item: dict[str, Any]) -> str:
        path = tmp_path / "some_env.py"
        path.write_text(f"from support.env_tasks import NumberEnv\nclass E(NumberEnv):\n{code}")
        spec = importlib.util.spec_from_file_location("some_env", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["some_env"] = module
        spec.loader.exec_module(module)
        return prepared_key(module.E(), item, SandboxSpec())

    one = "    async def prepare(self, item, ctx): pass\n"
    assert key(one, ITEM) == key(one, ITEM)
    others = [key(one + "    # changed\n", ITEM), key(one, ITEM | {"files": {"a": b"b"}}), key(one, {"id": "y"})]
    assert len({key(one, ITEM), *others}) == 4
