"""`rescore`: the workspaces of a run come back and only the reward runs; what is hostile or too large is left out."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from agent_loop.local_models.standin import PolicyRequest
from agent_loop.local_models.standin.policies import call
from agent_loop.records.record import AgentResult
from environments.base import HermesAgentEnvConfig, ToolContext
from environments.config.settings import WorkspaceSettings
from environments.errors import UsageError
from environments.rollouts.workspaces import KeptWorkspaces
from environments.runs.batch import evaluate_run
from environments.runs.comparison import read_run
from environments.runs.progress import PlainProgress
from environments.runs.rescoring import changed, rescore, stored_run
from environments.runs.store import whole_lines
from sandbox_pool import SlotPool
from sandbox_pool.spec import SandboxSpec
from support.env_tasks import NumberEnv, sometimes_right, standin_model, wanted


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[SlotPool]:
    async with SlotPool.from_config(HermesAgentEnvConfig().pool) as made:
        yield made


class StrictEnv(NumberEnv):
    """Another reward for the same items: only even numbers count. `agent_state` is asked too."""

    calls = 0

    async def compute_reward(self, item: dict[str, Any], result: AgentResult, ctx: ToolContext) -> float:
        StrictEnv.calls += 1
        kept = (await ctx.agent_state.read_file("answer.txt")).decode().strip()
        assert kept == (await ctx.terminal("cat answer.txt"))["output"].strip()
        assert result.tool_calls[0].arguments
        return float(kept == str(item["number"]) and item["number"] % 2 == 0)


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def again(env: NumberEnv, run: Path) -> Any:
    with PlainProgress((run / "progress").open("w")) as progress:
        return await rescore(env, run, stored_run(run)["verb"], read_run(run), progress)


async def test_only_the_reward_runs_again_and_the_same_reward_gives_the_same_scores(
    pool: SlotPool, tmp_path: Path
) -> None:
    async with standin_model(sometimes_right) as (model, standin):
        await evaluate_run(NumberEnv(pool, model, eval_items=3, eval_samples=2), tmp_path)
        asked = len(standin.log)
        old = read_run(tmp_path)
        same = await again(NumberEnv(pool, eval_items=3), tmp_path)
        assert (same.scored, dict(same.skipped)) == (6, {})
        assert list(same.records) == old
        new = await again(StrictEnv(pool, eval_items=2), tmp_path)
        assert len(standin.log) == asked
    assert StrictEnv.calls == 4
    assert dict(new.skipped) == {"the environment no longer has the item": 2}
    solved = [record for record in old if record.item_id == "e1" and record.verifier_score == 1.0]
    assert [before.rollout_id for before, _ in changed(old, new.records)] == [record.rollout_id for record in solved]
    assert solved


def hostile(request: PolicyRequest) -> str:
    """Links that lead out, a name with a newline, a file with a hole of a terabyte, a pipe."""
    if request.results:
        return "Done."
    command = (
        "ln -s / root; ln -s ../../../etc/passwd answer.link; mkfifo pipe; truncate -s 1T hole; touch $'a\\nb'; "
        f"chmod 000 .; chmod 755 .; echo {wanted(request)} > answer.txt"
    )
    return call("terminal", {"command": command})


async def test_a_hostile_workspace_comes_back_as_it_was_and_touches_nothing_here(
    pool: SlotPool, tmp_path: Path
) -> None:
    async with standin_model(hostile) as (model, _):
        await evaluate_run(NumberEnv(pool, model, eval_items=1), tmp_path)
    [kept] = (tmp_path / "workspaces").iterdir()
    assert kept.stat().st_size < 100_000
    assert (await again(NumberEnv(pool, eval_items=1), tmp_path)).records[0].verifier_score == 1.0


async def test_what_is_too_large_is_left_out_and_rollouts_keep_their_scores(pool: SlotPool, tmp_path: Path) -> None:
    def large(request: PolicyRequest) -> str:
        if request.results:
            return "Done."
        command = f"head -c 300000 /dev/urandom > noise; echo {wanted(request)} > answer.txt"
        return call("terminal", {"command": command})

    async with standin_model(large) as (model, _):
        env = NumberEnv(pool, model, eval_items=1, workspaces=WorkspaceSettings(max_mb=0.1))
        assert await evaluate_run(env, tmp_path) == 0
    assert list((tmp_path / "workspaces").iterdir()) == []
    found = await again(NumberEnv(pool, eval_items=1), tmp_path)
    assert (found.scored, dict(found.skipped)) == (0, {"no workspace was kept": 1})
    assert found.records[0].verifier_score == 1.0
    assert len(whole_lines(tmp_path / "groups.jsonl")) == 1


async def test_nothing_is_kept_when_it_is_switched_off(pool: SlotPool, tmp_path: Path) -> None:
    async with standin_model(sometimes_right) as (model, _):
        env = NumberEnv(pool, model, eval_items=1, workspaces=WorkspaceSettings(keep=False))
        await evaluate_run(env, tmp_path)
    assert not (tmp_path / "workspaces").exists()


@pytest.mark.parametrize(
    "data",
    [b"nonsense", gzip.compress(b"m" * 100)[:-9], gzip.compress(bytes(1 << 24))],
    ids=["not compressed", "cut off", "not a snapshot"],
)
async def test_damaged_files_are_refused(pool: SlotPool, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.0.gz").write_bytes(data)
    kept = KeptWorkspaces(tmp_path, WorkspaceSettings(max_mb=0.1))
    with pytest.raises(UsageError, match="damaged"):
        await kept.restored("x", pool, SandboxSpec(), whole_layer=False)


async def test_a_file_that_unpacks_to_far_more_than_the_limit_is_not_read_to_its_end(tmp_path: Path) -> None:
    (tmp_path / "x.0.gz").write_bytes(gzip.compress(bytes(1 << 26)))
    read: list[int] = []

    async def read_all() -> None:
        async for chunk in KeptWorkspaces(tmp_path, WorkspaceSettings(max_mb=0.1))._read(tmp_path / "x.0.gz"):
            read.append(len(chunk))

    with pytest.raises(UsageError, match="unpacks to more"):
        await read_all()
    assert sum(read) < 1 << 23
