"""process and evaluate: concurrent, resumed, repeatable, stored as `verify` wants it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.local_models.standin import Fault, PolicyRequest
from agent_loop.records.record import RolloutRecord
from agent_loop.records.verify import verify
from environments.errors import ConfigError
from environments.runs.batch import evaluate_run, process_run
from support.env_pool import DirectoryPool
from support.env_tasks import NumberEnv, right, sometimes_right, standin_model


@pytest.fixture
def pool() -> Iterator[DirectoryPool]:
    made = DirectoryPool(slots=16)
    yield made
    made.close()


def records(folder: Path) -> list[RolloutRecord]:
    return [RolloutRecord.from_json(line) for line in (folder / "rollouts.jsonl").read_bytes().splitlines()]


async def test_process_leaves_rollouts_sft_examples_and_a_summary(pool: DirectoryPool, tmp_path: Path) -> None:
    async with standin_model(sometimes_right) as (model, _):
        assert await process_run(NumberEnv(pool, model, total_steps=3), tmp_path) == 0
    stored = records(tmp_path)
    assert len(stored) == 12
    assert verify(record.to_json() for record in stored).ok
    examples = [json.loads(line) for line in (tmp_path / "sft.jsonl").read_text().splitlines()]
    assert len(examples) == sum(record.score == 1.0 for record in stored)
    assert all(example["messages"][1]["tool_calls"] for example in examples)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["overall"]["rollouts"] == 12
    assert {part["name"] for part in summary["categories"]} == {"even", "odd"}
    assert pool.live == {}


async def test_a_second_start_goes_on_and_repeats_nothing(pool: DirectoryPool, tmp_path: Path) -> None:
    async with standin_model(sometimes_right) as (model, standin):
        await process_run(NumberEnv(pool, model, total_steps=2), tmp_path)
        before, asked = (tmp_path / "rollouts.jsonl").read_bytes(), len(standin.log)
        await process_run(NumberEnv(pool, model, total_steps=4, groups_at_once=1), tmp_path)
        after = (tmp_path / "rollouts.jsonl").read_bytes()
        assert after.startswith(before)
        assert len(standin.log) == 2 * asked
    # Groups that run at the same time are stored as they end.
    assert sorted(record.item_id for record in records(tmp_path))[::4] == ["n0", "n1", "n2", "n3"]


async def test_the_same_seed_gives_the_same_run(pool: DirectoryPool, tmp_path: Path) -> None:
    tokens = []
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        async with standin_model(sometimes_right) as (model, _):
            await process_run(NumberEnv(pool, model, seed=seed), tmp_path / folder)
        stored = sorted(records(tmp_path / folder), key=lambda record: record.rollout_id)
        tokens.append([[segment.tokens for segment in record.segments] for record in stored])
    assert tokens[0] == tokens[1]
    assert tokens[0] != tokens[2]


async def test_a_group_that_failed_is_tried_again_by_the_next_start(pool: DirectoryPool, tmp_path: Path) -> None:
    broken = True

    def flaky(request: PolicyRequest) -> str:
        if broken and "Write 1 into" in request.text:
            raise Fault(400, "no")
        return sometimes_right(request)

    async with standin_model(flaky) as (model, _):
        assert await process_run(NumberEnv(pool, model, rollout_tries=1), tmp_path) == 1
        lost = [record for record in records(tmp_path) if not record.trainable]
        assert {record.item_id for record in lost} == {"n1"}
        summary = json.loads((tmp_path / "summary.json").read_text())
        assert summary["overall"]["zeros"]["infrastructure: api_error"] == 4
        broken = False
        assert await process_run(NumberEnv(pool, model, rollout_tries=1), tmp_path) == 0
    assert all(record.trainable for record in records(tmp_path))
    assert len(records(tmp_path)) == 12


async def test_evaluate_reports_pass_at_k(pool: DirectoryPool, tmp_path: Path) -> None:
    async with standin_model(right) as (model, _):
        env = NumberEnv(pool, model, eval_items=3, eval_samples=2)
        assert await evaluate_run(env, tmp_path) == 0
    overall = json.loads((tmp_path / "summary.json").read_text())["overall"]
    assert overall["mean_score"] == 1.0
    assert overall["pass_at"] == {"1": 1.0, "2": 1.0}


async def test_evaluation_beside_training_logs_metrics_of_the_step(pool: DirectoryPool, tmp_path: Path) -> None:
    class Logging(NumberEnv):
        logged: dict[str, Any]

        async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
            self.logged = dict(wandb_metrics or {})

    async with standin_model(right) as (model, _):
        env = Logging(pool, model, eval_items=2, data_dir_to_save_evals=str(tmp_path))
        env.curr_step = 7
        await env.evaluate()
    assert env.logged["eval/mean_score"] == 1.0
    assert env.logged["eval/pass@1"] == 1.0
    assert verify((tmp_path / "step-7.jsonl").read_bytes().splitlines()).ok
    assert env.stats.take()["outcomes/lost_to_infrastructure"] == 0.0


async def test_an_environment_without_evaluation_items_says_so(pool: DirectoryPool, tmp_path: Path) -> None:
    async with standin_model(right) as (model, _):
        with pytest.raises(ConfigError, match="no evaluation items"):
            await evaluate_run(NumberEnv(pool, model, eval_items=0), tmp_path)


async def test_what_each_rollout_left_is_stored_when_asked_for(pool: DirectoryPool, tmp_path: Path) -> None:
    async with standin_model(right) as (model, _):
        await process_run(NumberEnv(pool, model, total_steps=1, store_end_state=True), tmp_path / "with")
        await process_run(NumberEnv(pool, model, total_steps=1), tmp_path / "without")
    assert all(record.end_state for record in records(tmp_path / "with"))
    assert not any(record.end_state for record in records(tmp_path / "without"))
    assert all(record.pieces for record in records(tmp_path / "without"))
