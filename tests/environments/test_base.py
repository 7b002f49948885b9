"""Groups of an environment: exact sizes, exact tokens, nothing scored that the policy is not to blame for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from agent_loop.local_models.standin import Fault, PolicyRequest
from agent_loop.local_models.standin.policies import call
from agent_loop.records.verify import verify
from environments.atropos.groups import check_group
from environments.base import SandboxContext, Score
from environments.rollouts.rollout import as_score
from support.env_pool import DirectoryPool
from support.env_tasks import NumberEnv, right, sometimes_right, standin_model


@pytest.fixture
def pool() -> Iterator[DirectoryPool]:
    made = DirectoryPool()
    yield made
    made.close()


async def collect(env: NumberEnv) -> list[dict[str, Any]] | None:
    await env.setup()
    groups, backlog = await env.collect_trajectories(await env.get_next_item())
    assert backlog == []
    return groups


async def test_a_group_has_exact_tokens_masks_and_logprobs(pool: DirectoryPool) -> None:
    async with standin_model(sometimes_right) as (model, standin):
        groups = await collect(NumberEnv(pool, model))
        assert groups is not None
        [group] = groups
        assert len(group["tokens"]) == 4
        assert sorted(set(group["scores"])) == [0.0, 1.0]
        sampled = {(tuple(e.prompt_ids), tuple(e.sampled_ids), tuple(e.logprobs)) for e in standin.log}
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            trained = [(t, p) for t, m, p in zip(tokens, masks, logprobs, strict=True) if m != -100]
            last = max((e for e in sampled if list(e[0] + e[1]) == tokens[: len(e[0] + e[1])]), key=lambda e: len(e[0]))
            assert list(last[0] + last[1]) == tokens
            assert [t for t, _ in trained][-len(last[1]) :] == list(last[1])
            assert [p for _, p in trained][-len(last[2]) :] == list(last[2])
    assert pool.live == {}


async def test_records_satisfy_verify(pool: DirectoryPool) -> None:
    async with standin_model(sometimes_right) as (model, _):
        env = NumberEnv(pool, model)
        result = await env.run_group({"id": "x", "number": 7}, 0, 4)
    report = verify(record.to_json() for record in result.records())
    assert report.ok
    assert {record.outcome for record in result.records()} == {"finished"}
    for record in result.records():
        assert record.verifier_score in (0.0, 1.0)
        assert record.reward_components == {"verifier": record.score}
        assert {"acquire_s", "model_s", "tools_s", "verify_s", "total_s"} <= set(record.timing)
        assert record.isolation == "plain"
        assert [tool["function"]["name"] for tool in record.tools][:2] == ["terminal", "process"]


async def test_verification_runs_in_a_fork_after_the_slot_was_given_back() -> None:
    """One slot in all: a rollout that held its slot while verifying would wait for ever."""
    pool = DirectoryPool(slots=1)
    async with standin_model(right) as (model, _):
        result = await asyncio.wait_for(NumberEnv(pool, model).run_group({"id": "x", "number": 7}, 0, 3), 30)
    assert [rollout.record.score for rollout in result.scored] == [1.0] * 3
    assert sum(name.endswith("/verify") for name in pool.leases) == 3
    pool.close()


async def test_infrastructure_faults_are_tried_again_and_kept_apart(pool: DirectoryPool) -> None:
    pool.refuse = ["/0", "/1"]
    async with standin_model(right) as (model, _):
        env = NumberEnv(pool, model, ensure_scores_are_not_same=False)
        result = await env.run_group({"id": "x", "number": 7}, 0, 4)
    assert result.complete
    assert {record.outcome for record in result.lost} == {"sandbox_lost"}
    assert all(record.score is None and not record.trainable for record in result.lost)
    assert len(result.records()) == 6


async def test_a_group_that_cannot_be_completed_is_dropped_and_counted(pool: DirectoryPool) -> None:
    pool.refuse = ["/2"] * 3
    async with standin_model(sometimes_right) as (model, _):
        env = NumberEnv(pool, model, rollout_tries=3)
        assert await collect(env) is None
    assert env.counts.rejected == {"incomplete": 1}
    assert pool.live == {}


async def test_no_new_try_after_the_deadline(pool: DirectoryPool) -> None:
    pool.refuse = ["/0"] * 9
    async with standin_model(right) as (model, _):
        env = NumberEnv(pool, model, rollout_tries=9, group_deadline_s=1e-9)
        result = await env.run_group({"id": "x", "number": 7}, 0, 1)
    assert len(result.lost) == 1


async def test_a_model_that_fails_loses_the_rollout_and_never_scores_it(pool: DirectoryPool) -> None:
    def refuse(request: PolicyRequest) -> str:
        raise Fault(400, "no")

    async with standin_model(refuse) as (model, _):
        result = await NumberEnv(pool, model, rollout_tries=1).run_group({"id": "x", "number": 7}, 0, 2)
    assert not result.complete
    assert {(record.outcome, record.score) for record in result.lost} == {("api_error", None)}


@pytest.mark.parametrize("bad", [None, "1.0", float("nan")])
async def test_a_reward_that_is_no_number_loses_the_rollout(pool: DirectoryPool, bad: Any) -> None:
    class Bad(NumberEnv):
        async def compute_reward(self, *args: Any) -> Any:
            return bad

    async with standin_model(right) as (model, _):
        result = await Bad(pool, model, rollout_tries=1).run_group({"id": "x", "number": 7}, 0, 1)
    [lost] = result.lost
    assert (lost.outcome, lost.score, lost.trainable) == ("reward_error", None, False)
    assert pool.live == {}


async def test_preparation_runs_once_and_every_rollout_starts_from_it(pool: DirectoryPool) -> None:
    class Prepared(NumberEnv):
        prepared = 0

        async def prepare(self, item: Any, ctx: SandboxContext) -> None:
            self.prepared += 1
            await ctx.write_file("start.txt", f"item {item['number']}")

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            assert await ctx.agent_state.read_file("start.txt") == b"item 7"
            await ctx.write_file("start.txt", b"changed by one rollout's verifier")
            return 1.0

    async with standin_model(right) as (model, _):
        env = Prepared(pool, model)
        result = await env.run_group({"id": "x", "number": 7}, 0, 4)
    assert result.complete
    assert env.prepared == 1
    assert pool.snapshots == []


async def test_verification_of_the_whole_layer_drops_its_snapshot(pool: DirectoryPool) -> None:
    async with standin_model(right) as (model, _):
        result = await NumberEnv(pool, model, verification="layer").run_group({"id": "x", "number": 7}, 0, 2)
    assert [rollout.record.score for rollout in result.scored] == [1.0, 1.0]
    assert pool.snapshots == []
    assert pool.live == {}


async def test_cancelling_a_group_leaves_nothing(pool: DirectoryPool) -> None:
    def hang(request: PolicyRequest) -> str:
        return call("terminal", {"command": "sleep 60"})

    async with standin_model(hang) as (model, _):
        running = asyncio.create_task(NumberEnv(pool, model).run_group({"id": "x", "number": 7}, 0, 4))
        while len(pool.commands) < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert pool.live == {}


async def test_a_context_that_overflows_gives_segments_that_are_all_delivered(pool: DirectoryPool) -> None:
    def long_winded(request: PolicyRequest) -> str:
        if request.results >= 5:
            return "Done."
        return call("terminal", {"command": f"echo {request.body.get('seed', 0) % 7}; seq 300"})

    class Graded(NumberEnv):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(self.grades.pop())

    async with standin_model(long_winded, split_share=0.0) as (model, _):
        sizes = {"max_token_length": 2400, "max_tokens_per_turn": 100, "max_agent_turns": 8, "group_size": 2}
        env = Graded(pool, model, **sizes, enabled_toolsets=["terminal"], disabled_toolsets=["process"])
        env.mode = "process"
        env.grades = [0, 1]  # type: ignore[attr-defined]
        groups = await collect(env)
    assert groups is not None
    assert len(groups) > 1, "nothing was truncated"
    assert {len(group["tokens"]) for group in groups} == {2}
    assert all(group["advantages"] is not None for group in groups)
    assert all(len(row) <= 2400 for group in groups for row in group["tokens"])


async def test_the_tools_of_a_group_follow_from_the_seed(pool: DirectoryPool) -> None:
    from environments.rollouts.planning import choose_tools

    env = NumberEnv(pool, None, distribution="balanced", seed=3)
    drawn = [choose_tools(env.config, index) for index in range(8)]
    assert drawn == [choose_tools(env.config, index) for index in range(8)]
    assert len(set(drawn)) > 1
    with pytest.raises(ValueError, match="unknown toolset"):
        NumberEnv(pool, None, enabled_toolsets=["terminl"])
    with pytest.raises(ValueError, match="no tools are enabled"):
        NumberEnv(pool, None, enabled_toolsets=["terminal"], disabled_toolsets=["terminal"])
    with pytest.raises(ValueError, match="not both"):
        NumberEnv(pool, None, enabled_toolsets=["terminal"], distribution="balanced")


async def test_disabled_tools_are_taken_away_from_the_enabled_ones(pool: DirectoryPool) -> None:
    from environments.rollouts.planning import choose_tools

    env = NumberEnv(pool, None, enabled_toolsets=["terminal", "file"], disabled_toolsets=["process", "patch"])
    assert choose_tools(env.config, 0).names() == ("terminal", "read_file", "write_file", "search_files")


async def test_shaping_is_added_to_the_verifier_score_and_kept_apart(pool: DirectoryPool) -> None:
    async with standin_model(right) as (model, _):
        env = NumberEnv(pool, model, rewards={"terms": {"valid_calls": 0.1}})
        result = await env.run_group({"id": "x", "number": 7}, 0, 1)
    [record] = result.records()
    assert record.verifier_score == 1.0
    assert record.score == pytest.approx(1.1)
    assert record.reward_components == {"verifier": 1.0, "valid_calls": pytest.approx(0.1)}


async def test_per_turn_rewards_reach_the_advantages(pool: DirectoryPool) -> None:
    class PerTurn(NumberEnv):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> Score:
            return Score(1.0, turn_rewards=[float(item["number"]), 0.0], components={"style": 0.5})

    async with standin_model(right) as (model, _):
        env = PerTurn(pool, model, group_size=2, advantages="mean")
        await env.setup()
        groups, _ = await env.collect_trajectories({"id": "x", "number": 4})
    [group] = groups or []
    assert {round(a, 3) for row in group["advantages"] for a in row} == {0.0, 2.0, -2.0}


def test_scores_are_taken_as_plain_numbers() -> None:
    import numpy as np

    assert as_score(np.float32(0.5)).score == 0.5
    assert type(as_score(np.float32(0.5)).score) is float
    assert as_score(True).score == 1.0
    with pytest.raises(ValueError, match="not a number"):
        as_score("1")


async def test_the_saved_groups_are_rollout_records(pool: DirectoryPool, tmp_path: Any) -> None:
    path = tmp_path / "deep/groups.jsonl"
    async with standin_model(sometimes_right) as (model, _):
        await collect(NumberEnv(pool, model, data_path_to_save_groups=str(path)))
    assert verify(path.read_bytes().splitlines()).ok
    assert len(path.read_bytes().splitlines()) == 4


async def test_a_group_is_checked_once(pool: DirectoryPool, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []

    def count(group: Any, *limits: Any) -> None:
        checked.append(len(group["tokens"]))
        check_group(group, *limits)

    for module in ("packing", "atropos_env"):
        monkeypatch.setattr(f"environments.atropos.{module}.check_group", count)
    async with standin_model(right) as (model, _):
        env = NumberEnv(pool, model, ensure_scores_are_not_same=False)
        await env.setup()
        await env._run_group(await env.get_next_item())
    assert checked == [4]
    assert env.counts.rejected == {}
    assert len(env.completion_lengths) == 4


async def test_what_an_environment_changes_after_packing_is_checked_again(pool: DirectoryPool) -> None:
    class Meddling(NumberEnv):
        async def postprocess_histories(self, trajectories: Any) -> Any:
            trajectories[0]["masks"][0][-1] = 7
            return trajectories

    async with standin_model(right) as (model, _):
        env = Meddling(pool, model, ensure_scores_are_not_same=False)
        await env.setup()
        await env._run_group(await env.get_next_item())
    assert env.counts.rejected == {"masks": 1}


async def test_a_trainer_that_takes_less_gets_nothing_longer(pool: DirectoryPool) -> None:
    async with standin_model(right) as (model, _):
        env = NumberEnv(pool, model, ensure_scores_are_not_same=False)
        groups = await collect(env)
    env.max_token_len = 16
    await env.handle_send_to_api(groups)
    assert env.counts.rejected == {"too_long": 1}
