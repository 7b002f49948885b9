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
from environments.errors import ConfigError
from environments.rollouts.rollout import as_score
from environments.rollouts.tool_session import NoModel
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
        result = await env.rollouts.run_group({"id": "x", "number": 7}, 0, 4)
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
        result = await asyncio.wait_for(NumberEnv(pool, model).rollouts.run_group({"id": "x", "number": 7}, 0, 3), 30)
    assert [rollout.record.score for rollout in result.scored] == [1.0] * 3
    assert sum(name.endswith("/verify") for name in pool.leases) == 3
    pool.close()


async def test_infrastructure_faults_are_tried_again_and_kept_apart(pool: DirectoryPool) -> None:
    pool.refuse = ["/0", "/1"]
    async with standin_model(right) as (model, _):
        env = NumberEnv(pool, model, ensure_scores_are_not_same=False)
        result = await env.rollouts.run_group({"id": "x", "number": 7}, 0, 4)
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
        result = await env.rollouts.run_group({"id": "x", "number": 7}, 0, 1)
    assert len(result.lost) == 1


async def test_a_model_that_fails_loses_the_rollout_and_never_scores_it(pool: DirectoryPool) -> None:
    def refuse(request: PolicyRequest) -> str:
        raise Fault(400, "no")

    async with standin_model(refuse) as (model, _):
        result = await NumberEnv(pool, model, rollout_tries=1).rollouts.run_group({"id": "x", "number": 7}, 0, 2)
    assert not result.complete
    assert {(record.outcome, record.score) for record in result.lost} == {("api_error", None)}


@pytest.mark.parametrize("bad", [None, "1.0", float("nan")])
async def test_a_reward_that_is_no_number_loses_the_rollout(pool: DirectoryPool, bad: Any) -> None:
    class Bad(NumberEnv):
        async def compute_reward(self, *args: Any) -> Any:
            return bad

    async with standin_model(right) as (model, _):
        result = await Bad(pool, model, rollout_tries=1).rollouts.run_group({"id": "x", "number": 7}, 0, 1)
    [lost] = result.lost
    assert (lost.outcome, lost.score, lost.trainable) == ("reward_error", None, False)
    assert pool.live == {}


async def test_an_error_of_the_reward_code_is_verified_again_and_costs_no_other_rollout(pool: DirectoryPool) -> None:
    class Broken(NumberEnv):
        calls = 0

        async def compute_reward(self, *args: Any) -> float:
            self.calls += 1
            raise KeyError("typo")

    async with standin_model(right) as (model, standin):
        env = Broken(pool, model, rollout_tries=3)
        result = await env.rollouts.run_group({"id": "x", "number": 7}, 0, 2)
    assert [record.outcome for record in result.lost] == ["reward_error"] * 2
    assert len(standin.log) == 4, "two turns for each of two rollouts"
    assert env.calls == 4, "each is verified twice, and stops at the second equal error"
    assert env.stats.take()["outcomes/lost_to_infrastructure"] == 0.0
    assert pool.snapshots == []


async def test_a_reward_code_that_always_fails_ends_the_run_by_its_name(pool: DirectoryPool) -> None:
    class Broken(NumberEnv):
        async def compute_reward(self, *args: Any) -> float:
            raise KeyError("typo")

    async with standin_model(right) as (model, _):
        env = Broken(pool, model)
        await env.rollouts.run_group({"id": "x", "number": 1}, 0, 15)
        with pytest.raises(ConfigError, match="compute_reward failed 16 times with the same error: KeyError: 'typo'"):
            await env.rollouts.run_group({"id": "x", "number": 1}, 1, 1)
    assert pool.snapshots == []


async def test_a_fault_of_the_fork_is_verified_again(pool: DirectoryPool) -> None:
    pool.refuse = ["/verify"]
    async with standin_model(right) as (model, standin):
        result = await NumberEnv(pool, model).rollouts.run_group({"id": "x", "number": 7}, 0, 1)
    assert [rollout.record.score for rollout in result.scored] == [1.0]
    assert result.lost == []
    assert len(standin.log) == 2


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("rm -rf /workspace", "the workspace is gone"),
        ("rm -rf /workspace; ln -s /etc /workspace", "the workspace is not a folder: symlink"),
        ("true", "No such file"),
        ("echo sleep 30 > answer.txt", "takes longer than"),
    ],
)
async def test_what_the_agent_destroys_is_its_failure_and_trained_on(
    pool: DirectoryPool, command: str, reason: str
) -> None:
    class Reading(NumberEnv):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            await ctx.stat("answer.txt")
            return float((await ctx.exec("bash answer.txt", timeout_s=0.2)).exit_code == 0)

    def destroy(request: PolicyRequest) -> str:
        return "Done." if request.results else call("terminal", {"command": command})

    async with standin_model(destroy) as (model, standin):
        result = await Reading(pool, model, rewards={"terms": {"valid_calls": 0.1}}).rollouts.run_group(
            {"id": "x", "number": 7}, 0, 1
        )
    [record] = result.records()
    assert (record.outcome, record.trainable, record.verifier_score) == ("agent_fault", True, 0.0)
    assert record.score == pytest.approx(0.1)
    assert reason in str(record.error)
    assert len(standin.log) == 2, "it is not tried again"
    assert pool.snapshots == []


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
        result = await env.rollouts.run_group({"id": "x", "number": 7}, 0, 4)
    assert result.complete
    assert env.prepared == 1
    assert pool.snapshots == []


async def test_without_toolsets_there_are_no_tools_and_no_slot(pool: DirectoryPool) -> None:
    class Asked(NumberEnv):
        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            assert result.final_answer == "It is 7."
            with pytest.raises(RuntimeError, match="no workspace"):
                _ = ctx.agent_state
            return float((await ctx.exec("echo 7")).output == "7\n") if item["number"] else 1.0

    async with standin_model(lambda request: "It is 7.") as (model, _):
        env = Asked(pool, model, enabled_toolsets=[])
        assert (await env.rollouts.run_group({"id": "x", "number": 0}, 0, 2)).complete
        assert pool.leases == []
        checked = await env.rollouts.run_group({"id": "x", "number": 7}, 1, 1)
    assert [rollout.record.score for rollout in checked.scored] == [1.0]
    assert [name.rpartition("/")[2] for name in pool.leases] == ["verify"]
    assert checked.scored[0].record.tools == []


async def test_start_runs_in_each_rollouts_slot_and_files_of_the_item_are_there(pool: DirectoryPool) -> None:
    class Started(NumberEnv):
        async def start(self, item: Any, ctx: SandboxContext) -> None:
            await ctx.exec("cat given.txt > started.txt")

        async def compute_reward(self, item: Any, result: Any, ctx: Any) -> float:
            return float(await ctx.read_file("started.txt") == b"given")

    async with standin_model(right) as (model, _):
        result = await Started(pool, model).rollouts.run_group(
            {"id": "x", "number": 7, "files": {"given.txt": "given"}}, 0, 3
        )
    assert [rollout.record.score for rollout in result.scored] == [1.0] * 3


async def test_a_workdir_that_is_the_root_is_refused(pool: DirectoryPool) -> None:
    env = NumberEnv(pool, NoModel(), sandbox={"workdir": "/"})
    with pytest.raises(ConfigError, match="name a folder below /"):
        await env.rollouts.run_group({"id": "x", "number": 7}, 0, 1)


class Unprepared(NumberEnv):
    """Items with an odd number cannot be prepared; slots may be refused as well."""

    async def prepare(self, item: Any, ctx: SandboxContext) -> None:
        if item["number"] % 2:
            await ctx.read_file("missing")


async def test_an_item_that_cannot_be_prepared_is_lost_by_its_reason_and_the_run_goes_on(pool: DirectoryPool) -> None:
    async with standin_model(right) as (model, standin):
        env = Unprepared(pool, model, ensure_scores_are_not_same=False)
        lost = await env.rollouts.run_group({"id": "x", "number": 1}, 0, 2)
        assert standin.log == []
        done = await env.rollouts.run_group({"id": "y", "number": 2}, 1, 2)
    [record] = lost.records()
    assert (record.outcome, record.trainable, record.item_id) == ("prepare_error", False, "x")
    assert "No such file" in str(record.error)
    assert not lost.complete
    assert done.complete
    assert pool.snapshots == []


async def test_a_slot_that_is_lost_while_preparing_is_tried_again(pool: DirectoryPool) -> None:
    pool.refuse = ["/prepare", "/prepare"]
    async with standin_model(right) as (model, _):
        assert (
            await Unprepared(pool, model, rollout_tries=3).rollouts.run_group({"id": "x", "number": 2}, 0, 2)
        ).complete


async def test_too_many_items_that_cannot_be_prepared_end_the_run(pool: DirectoryPool) -> None:
    env = Unprepared(pool, NoModel(), max_failed_items=1)
    await env.rollouts.run_group({"id": "x", "number": 1}, 0, 2)
    with pytest.raises(ConfigError, match=r"2 items could not be prepared, more than env.max_failed_items \(1\).*y"):
        await env.rollouts.run_group({"id": "y", "number": 3}, 1, 2)


async def test_verification_of_the_whole_layer_drops_its_snapshot(pool: DirectoryPool) -> None:
    async with standin_model(right) as (model, _):
        result = await NumberEnv(pool, model, verification="layer").rollouts.run_group({"id": "x", "number": 7}, 0, 2)
    assert [rollout.record.score for rollout in result.scored] == [1.0, 1.0]
    assert pool.snapshots == []
    assert pool.live == {}


async def test_cancelling_a_group_leaves_nothing(pool: DirectoryPool) -> None:
    def hang(request: PolicyRequest) -> str:
        return call("terminal", {"command": "sleep 60"})

    async with standin_model(hang) as (model, _):
        running = asyncio.create_task(NumberEnv(pool, model).rollouts.run_group({"id": "x", "number": 7}, 0, 4))
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
        env.rollouts.mode = "process"
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
        result = await env.rollouts.run_group({"id": "x", "number": 7}, 0, 1)
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
