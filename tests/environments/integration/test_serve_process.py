"""The trainer-side proof: a real run-api, `hermes-rl serve` as a process, and a trainer that checks every token.

The stand-in's own log is the truth: what it was asked, what it sampled, with which logprobs.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.local_models.standin import StandIn
from agent_loop.records.verify import verify
from environments.launch import load_environment
from support.atropos_api import RunApi, Trainer
from support.env_serve import ServedEnv, play, sampled_by_server, trained_by_trainer

MakeEnv = Callable[..., ServedEnv]


@pytest.fixture
async def standin() -> AsyncIterator[StandIn]:
    async with StandIn(play) as server:
        yield server


@pytest.fixture
def make_env(api: RunApi, standin: StandIn, tmp_path: Path) -> Iterator[MakeEnv]:
    made: list[ServedEnv] = []

    def make(name: str = "finite", **env: Any) -> ServedEnv:
        made.append(ServedEnv(tmp_path, name, api.url, standin.url, **env))
        return made[-1]

    yield make
    for env in made:
        env.stop()


async def ended(env: ServedEnv, timeout_s: float = 90.0) -> int:
    return await asyncio.to_thread(env.wait, timeout_s)


async def registered(api: RunApi, **trainer: Any) -> Trainer:
    made = Trainer(api.url, max_token_len=8193, **trainer)
    await asyncio.to_thread(made.register)
    return made


async def test_every_sampled_token_reaches_the_trainer_exactly_once(
    api: RunApi, standin: StandIn, make_env: MakeEnv
) -> None:
    trainer = await registered(api)
    env = make_env(items=6)
    env.start()
    await asyncio.to_thread(trainer.pull_until, 3, 90.0)
    assert await ended(env) == 0, env.said()
    sampled = sampled_by_server(standin.log)
    assert sampled
    assert trained_by_trainer(trainer.groups()) == sampled
    check_scores(trainer, env)
    report = verify((env.folder / "finite.jsonl").read_bytes().splitlines())
    assert report.ok
    assert report.rollouts == 24
    for path in env.folder.rglob("*"):
        if path.is_file() and path != env.path:
            assert b"sk-hush-7" not in path.read_bytes(), f"the API key is in {path}"


def check_scores(trainer: Trainer, env: ServedEnv) -> None:
    """The score of each sequence is the stored one of its rollout, and that follows from what the rollout wrote."""
    stored = [json.loads(line) for line in (env.folder / f"{env.name}.jsonl").read_bytes().splitlines()]
    scores = {record["rollout_id"]: record["score"] for record in stored}
    for record in stored:
        written = " > answer.txt" in json.dumps(record["messages"]) and "echo wrong" not in json.dumps(
            record["messages"]
        )
        assert record["score"] == float(written)
    for group in trainer.groups():
        ids = group["generation_params"]["rollout_ids"]
        assert group["scores"] == [scores[rollout_id] for rollout_id in ids]


async def test_a_slow_and_a_fast_environment_together_lose_nothing(
    api: RunApi, standin: StandIn, make_env: MakeEnv
) -> None:
    trainer = await registered(api)
    slow = load_environment(make_env("slow", items=4, seconds=1.0).path)
    fast = load_environment(make_env("fast", items=16, first=1000).path)
    async with asyncio.TaskGroup() as group:
        for env in (slow, fast):
            group.create_task(env.env_manager())
        group.create_task(asyncio.to_thread(trainer.pull_until, 10, 110.0, 0.3))
    assert trained_by_trainer(trainer.groups()) == sampled_by_server(standin.log)
    for env, items in ((slow, 4), (fast, 16)):
        assert (env.counts.started, env.counts.finished, env.counts.cancelled) == (items, items, 0)


async def test_sigterm_finishes_what_runs_and_delivers_it(api: RunApi, standin: StandIn, make_env: MakeEnv) -> None:
    trainer = await registered(api)
    env = make_env(items=100, seconds=0.5, max_batches_offpolicy=1)
    env.start()
    await asyncio.to_thread(trainer.pull_until, 1, 60.0)
    env.signal(signal.SIGTERM)
    assert await ended(env) == 0, env.said()
    while await asyncio.to_thread(trainer.pull):
        pass
    left = sampled_by_server(standin.log) - trained_by_trainer(trainer.groups())
    assert not trained_by_trainer(trainer.groups()) - sampled_by_server(standin.log)
    # run-api hands out pairs of groups: one whole group may stay in its queue
    assert len(left) in (0, 8), env.said()
    assert "'cancelled': 0" in env.said()
