"""`serve --workers`: a real run-api, and several processes that play the groups of one environment."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent_loop.local_models.standin import StandIn
from agent_loop.records.verify import verify
from environments.atropos.workers import _Worker
from sandbox_pool.journal.journal import Journal
from support.atropos_api import RunApi, Trainer
from support.env_serve import ServedEnv, play, sampled_by_server, trained_by_trainer
from support.pool_wait import eventually

pytestmark = pytest.mark.ci


@pytest.fixture
async def standin() -> AsyncIterator[StandIn]:
    async with StandIn(play) as server:
        yield server


@pytest.fixture
def env(api: RunApi, standin: StandIn, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServedEnv]:
    served = ServedEnv(tmp_path, "finite", api.url, standin.url, **getattr(request, "param", {}))
    yield served
    served.stop()


async def registered(api: RunApi) -> Trainer:
    trainer = Trainer(api.url, max_token_len=8193)
    await asyncio.to_thread(trainer.register)
    return trainer


def status(env: ServedEnv) -> dict[str, Any]:
    path = env.folder / f"{env.name}.status.json"
    return json.loads(path.read_bytes())["facts"] if path.exists() else {}


def pids(env: ServedEnv) -> list[int]:
    return [worker["pid"] for worker in status(env).get("workers", []) if worker["ready"]]


def groups_by_item(trainer: Trainer) -> Counter[str]:
    return Counter(group["generation_params"]["item_id"] for group in trainer.groups())


def ids_of(env: ServedEnv) -> set[str]:
    """The series of groups that were stored: each process has its own."""
    lines = (env.folder / "finite.jsonl").read_bytes().splitlines()
    return {json.loads(line)["group_id"].split("-")[1] for line in lines}


def left_in_journal(env: ServedEnv) -> tuple[list[Any], list[Any]]:
    journal = Journal(env.folder / "state")
    try:
        return journal.hosts(), journal.leases()
    finally:
        journal.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("env", [{"items": 8, "seconds": 0.3}], indirect=True)
async def test_two_workers_play_each_item_once_into_one_folder(api: RunApi, standin: StandIn, env: ServedEnv) -> None:
    trainer = await registered(api)
    env.start("--workers", "2")
    await asyncio.to_thread(trainer.pull_until, 4, 90.0)
    assert await asyncio.to_thread(env.wait, 60.0) == 0, env.said()
    assert groups_by_item(trainer) == {f"n{number}": 1 for number in range(8)}
    assert trained_by_trainer(trainer.groups()) == sampled_by_server(standin.log)
    report = verify((env.folder / "finite.jsonl").read_bytes().splitlines())
    assert (report.ok, report.rollouts) == (True, 32)
    assert len(ids_of(env)) == 2, "one of the workers played nothing"
    assert status(env)["sent"] == 8
    assert left_in_journal(env) == ([], [])


@pytest.mark.parametrize("env", [{"items": 8, "seconds": 1.0}], indirect=True)
async def test_what_a_killed_worker_had_under_way_is_played_again_and_nothing_twice(
    api: RunApi, standin: StandIn, env: ServedEnv
) -> None:
    trainer = await registered(api)
    env.start("--workers", "2")
    await eventually(lambda: len(pids(env)) == 2 and any(worker["groups"] for worker in status(env)["workers"]), 60)
    busy = next(worker["pid"] for worker in status(env)["workers"] if worker["groups"])
    os.kill(busy, signal.SIGKILL)
    await asyncio.to_thread(trainer.pull_until, 4, 90.0)
    assert await asyncio.to_thread(env.wait, 60.0) == 0, env.said()
    assert groups_by_item(trainer) == {f"n{number}": 1 for number in range(8)}
    assert not trained_by_trainer(trainer.groups()) - sampled_by_server(standin.log)
    assert status(env)["workers_restarted"] == 1
    assert "ended (SIGKILL): what it had under way is played again" in env.said()
    assert left_in_journal(env) == ([], [])


@pytest.mark.parametrize("env", [{"items": 100, "seconds": 0.5}], indirect=True)
async def test_sigterm_to_all_of_them_finishes_what_runs(api: RunApi, standin: StandIn, env: ServedEnv) -> None:
    trainer = await registered(api)
    env.start("--workers", "2")
    await asyncio.to_thread(trainer.pull_until, 1, 60.0)
    workers = pids(env)
    for pid in workers:
        os.kill(pid, signal.SIGTERM)
    env.signal(signal.SIGTERM)
    assert await asyncio.to_thread(env.wait, 60.0) == 0, env.said()
    while await asyncio.to_thread(trainer.pull):
        pass
    assert "'cancelled': 0" in env.said()
    # run-api hands out pairs of groups: one whole group may stay in its queue
    left = sampled_by_server(standin.log) - trained_by_trainer(trainer.groups())
    assert len(left) in (0, 8), env.said()
    assert not any(map(alive, workers))


@pytest.mark.parametrize("env", [{"items": 100, "seconds": 0.5}], indirect=True)
async def test_workers_end_with_the_process_that_started_them(api: RunApi, standin: StandIn, env: ServedEnv) -> None:
    await registered(api)
    env.start("--workers", "2")
    await eventually(lambda: len(pids(env)) == 2, 60)
    workers = pids(env)
    env.signal(signal.SIGKILL)
    await eventually(lambda: not any(map(alive, workers)), 30)


@pytest.mark.parametrize("env", [{"items": 2, "broken_workers": True}], indirect=True)
async def test_a_worker_that_cannot_start_ends_the_run_with_its_reason(
    api: RunApi, standin: StandIn, env: ServedEnv
) -> None:
    await registered(api)
    env.start("--workers", "2")
    assert await asyncio.to_thread(env.wait, 60.0) != 0
    assert "no tasks for workers" in env.said().splitlines()[-1]


async def test_a_worker_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("environments.atropos.workers.ASK_EVERY_S", 0.01)
    monkeypatch.setattr("environments.atropos.workers.SILENT_S", 0.05)
    monkeypatch.setattr("sandbox_pool.process_channel.CANCEL_TIMEOUT_S", 0.05)
    worker = _Worker(SimpleNamespace(pool=None, command=["sleep", "1000"]), 3)  # type: ignore[arg-type]
    await worker.start()
    worker.began = True
    await asyncio.wait_for(worker.watch(), 30)
    assert await worker.ended() == -signal.SIGKILL
    assert "worker 3 gave no answer for 0.05 s and is killed" in caplog.text


def test_a_number_of_workers_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from environments.apps.cli.main import main

    assert main(["serve", "terminal_tasks", "--workers", "0"]) == 2
    assert "'0' is not a number of processes: give 1 or more" in capsys.readouterr().err
