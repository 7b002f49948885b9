"""`verification: live`: the check sees what runs in the agent's slot, in a shell of its own. Errors of `start`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from agent_loop.local_models.standin import PolicyRequest
from agent_loop.local_models.standin.policies import call
from environments.errors import ConfigError
from sandbox_pool import PoolConfig, SlotPool
from support.env_tasks import NumberEnv, right, standin_model

SERVE = "mkdir -p www && echo 7 > www/n && cd www && (setsid python3 -m http.server 8123 >/dev/null 2>&1 &)"
WAIT = "for i in $(seq 200); do curl -s localhost:8123/n >/dev/null && break; sleep 0.05; done"
LIE = "curl() { echo 7; }; export -f curl; alias curl='echo 7'; export PATH=/nowhere; cd /"


class Service(NumberEnv):
    """The task is a service that answers with the number."""

    async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
        with pytest.raises(RuntimeError, match="live"):
            _ = ctx.agent_state
        assert (await ctx.exec("pwd")).output.strip().endswith("workspace")
        return float((await ctx.exec("curl -s localhost:8123/n")).output == "7\n")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SlotPool]:
    state = tmp_path_factory.mktemp("live")
    async with SlotPool.from_config(PoolConfig(slots_per_host=1, max_hosts=1, state_dir=state)) as opened:
        yield opened


async def score(pool: SlotPool, env: type[NumberEnv], commands: list[str]) -> Any:
    def play(request: PolicyRequest) -> str:
        done = request.results
        return call("terminal", {"command": commands[done]}) if done < len(commands) else "Done."

    async with standin_model(play) as (model, _):
        ran = await env(pool, model, verification="live", rollout_tries=1).rollouts.run_group(
            {"id": "x", "number": 7}, 0, 1
        )
    [record] = ran.records()
    return record


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("commands", "wanted"), [([SERVE, WAIT], 1.0), ([LIE], 0.0), ([SERVE, WAIT, LIE], 1.0)])
async def test_a_service_is_checked_while_it_runs(pool: SlotPool, commands: list[str], wanted: float) -> None:
    """One slot is enough: none other is asked for."""
    record = await score(pool, Service, commands)
    assert (record.trainable, record.verifier_score) == (True, wanted), record.error


class Broken(NumberEnv):
    async def start(self, item: Any, ctx: Any) -> None:
        raise KeyError("no such service")


@pytest.mark.asyncio(loop_scope="module")
async def test_an_error_in_start_loses_the_item_and_not_the_run(pool: SlotPool) -> None:
    async with standin_model(right) as (model, standin):
        env = Broken(pool, model, rollout_tries=3, max_failed_items=1)
        result = await env.rollouts.run_group({"id": "x", "number": 7}, 0, 2)
        assert [(r.outcome, r.error) for r in result.records()] == [
            ("prepare_error", "start: KeyError: 'no such service'")
        ] * 2
        with pytest.raises(ConfigError, match="max_failed_items"):
            await env.rollouts.run_group({"id": "x", "number": 7}, 1, 2)
        assert standin.log == []
