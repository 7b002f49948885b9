"""Serve mode against a real run-api: nothing running is ever cancelled, nothing is lost, everything ends."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from environments.atropos.api import ApiLost, EnvStatus
from environments.atropos.atropos_env import AtroposEnvConfig
from environments.atropos.serve_loop import Pace, ServeHooks, ServeLoop
from environments.atropos.stops import Stop
from environments.errors import ConfigError
from environments.runs.status import sole_writer
from environments.runs.store import RunInUse
from support.atropos_api import RunApi, Trainer
from support.atropos_envs import NumberedEnv, until


def delivered(trainer: Trainer) -> list[int]:
    return [group["tokens"][0][0] for group in trainer.groups()]


async def train(trainer: Trainer, batches: int, pause_s: float = 0.05) -> None:
    await asyncio.to_thread(trainer.pull_until, batches, 60.0, pause_s)


async def stop_serving(env: NumberedEnv, serving: asyncio.Task[None], stop: Stop) -> None:
    stop.ask("test")
    await asyncio.wait_for(serving, 20)


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Stop:
    """The stop that serve loops of this test will obey, instead of signals to the test process."""
    made = Stop()
    monkeypatch.setattr("environments.atropos.atropos_env.Stop", lambda: made)
    return made


async def test_a_slow_environment_beside_a_fast_one_finishes_everything_it_starts(api: RunApi, stop: Stop) -> None:
    trainer = Trainer(api.url)
    await asyncio.to_thread(trainer.register)
    slow = NumberedEnv(seconds=1.0, rollout_server_url=api.url)
    fast = NumberedEnv(seconds=0.01, rollout_server_url=api.url)
    serving = [asyncio.create_task(env.env_manager()) for env in (slow, fast)]
    await train(trainer, 12, pause_s=0.3)
    stop.ask("test")
    await asyncio.wait_for(asyncio.gather(*serving), 30)
    await asyncio.to_thread(pull_rest, trainer)
    assert slow.cancelled == fast.cancelled == []
    assert slow.finished, "the slow environment was starved"
    assert sorted(slow.started + fast.started) == sorted(slow.finished + fast.finished)
    # run-api hands out whole batches only: at most one group (half a batch) can stay in its queue
    got = Counter(delivered(trainer))
    assert set(got.values()) == {1}
    missing = set(slow.finished + fast.finished) - set(got)
    assert len(missing) == trainer.status()["queue_size"] <= 1


async def test_two_that_serve_into_one_file_are_refused(tmp_path: Path) -> None:
    stored = tmp_path / "runs" / "rollouts.jsonl"
    env = NumberedEnv(data_path_to_save_groups=str(stored), rollout_server_url="http://127.0.0.1:9")
    with sole_writer(stored):
        with sole_writer(stored.with_name("other.jsonl")):
            pass
        with pytest.raises(RunInUse, match="is being written by another serve"):
            await env.env_manager()
    assert env.shut == 0
    with sole_writer(stored):
        pass


def pull_rest(trainer: Trainer) -> None:
    while trainer.pull():
        pass


async def test_serving_ends_at_the_trainers_last_step_and_says_goodbye(api: RunApi) -> None:
    trainer = Trainer(api.url, num_steps=3)
    await asyncio.to_thread(trainer.register)
    env = NumberedEnv(seconds=0.01, rollout_server_url=api.url)
    serving = asyncio.create_task(env.env_manager())
    await train(trainer, 3)
    await asyncio.wait_for(serving, 20)
    assert env.config.total_steps == 3
    assert env.cancelled == []
    assert env.shut == 1
    # every environment is disconnected: run-api then divides by the weight of nobody
    async with __import__("aiohttp").ClientSession() as session:
        answer = await session.get(api.url + "/status-env", json={"env_id": env.env_id})
        assert answer.status == 500


async def test_no_more_items_ends_the_run_with_everything_delivered(api: RunApi) -> None:
    trainer = Trainer(api.url)
    await asyncio.to_thread(trainer.register)
    env = NumberedEnv(items=4, rollout_server_url=api.url)
    await asyncio.wait_for(env.env_manager(), 20)
    await train(trainer, 2)
    assert sorted(delivered(trainer)) == sorted(env.started)
    assert len(env.started) == 4


@pytest.mark.parametrize("handling", ["NONE", "LIMIT_TRAIN", "STOP_TRAIN"])
async def test_evaluations_fire_on_every_step_and_cancel_nothing(api: RunApi, stop: Stop, handling: str) -> None:
    trainer = Trainer(api.url)
    await asyncio.to_thread(trainer.register)
    env = NumberedEnv(seconds=0.1, rollout_server_url=api.url, steps_per_eval=1, eval_handling=handling)
    serving = asyncio.create_task(env.env_manager())
    await train(trainer, 6)
    await stop_serving(env, serving, stop)
    assert env.evaluations >= 1
    assert env.cancelled == []
    assert sorted(env.started) == sorted(env.finished)


async def test_a_stop_finishes_and_delivers_what_runs(api: RunApi, stop: Stop) -> None:
    trainer = Trainer(api.url)
    await asyncio.to_thread(trainer.register)
    env = NumberedEnv(seconds=1.0, rollout_server_url=api.url)
    serving = asyncio.create_task(env.env_manager())
    await until(lambda: len(env.started) >= 6)
    await stop_serving(env, serving, stop)
    await train(trainer, 3)
    assert env.cancelled == []
    assert sorted(delivered(trainer)) == sorted(env.started)


async def test_a_second_stop_cancels_at_once_and_counts(api: RunApi, stop: Stop) -> None:
    await asyncio.to_thread(Trainer(api.url).register)
    env = NumberedEnv(seconds=60.0, rollout_server_url=api.url)
    serving = asyncio.create_task(env.env_manager())
    await until(lambda: len(env.started) >= 6)
    stop.ask("first")
    await asyncio.sleep(0.1)
    assert not serving.done()
    await stop_serving(env, serving, stop)
    assert len(env.cancelled) == env.counts.cancelled == 6
    assert env.shut == 1


async def test_a_drain_has_a_limit(api: RunApi, stop: Stop) -> None:
    await asyncio.to_thread(Trainer(api.url).register)
    env = NumberedEnv(seconds=60.0, rollout_server_url=api.url, drain_timeout_s=0.2)
    serving = asyncio.create_task(env.env_manager())
    await until(lambda: env.started)
    await stop_serving(env, serving, stop)
    assert env.counts.cancelled == len(env.started)


async def test_a_stop_before_there_is_a_trainer_ends_quietly(api: RunApi, stop: Stop) -> None:
    env = NumberedEnv(rollout_server_url=api.url)
    serving = asyncio.create_task(env.env_manager())
    await asyncio.sleep(0.2)
    await stop_serving(env, serving, stop)
    assert env.shut == 1


async def test_run_api_killed_and_restarted_under_load_doubles_nothing(mortal_api: RunApi, stop: Stop) -> None:
    first = Trainer(mortal_api.url)
    await asyncio.to_thread(first.register)
    env = NumberedEnv(seconds=0.05, rollout_server_url=mortal_api.url)
    serving = asyncio.create_task(env.env_manager())
    await train(first, 2)
    mortal_api.kill()
    await asyncio.sleep(0.3)
    await asyncio.to_thread(mortal_api.start)
    second = Trainer(mortal_api.url)
    await asyncio.to_thread(second.register)
    await train(second, 4)
    await stop_serving(env, serving, stop)
    assert env.cancelled == []
    assert set(Counter(delivered(first) + delivered(second)).values()) == {1}
    assert env.outbox is not None
    assert env.outbox.delivery.uncertain == 0


async def test_a_run_api_that_never_comes_is_one_clear_error() -> None:
    env = NumberedEnv(rollout_server_url="http://127.0.0.1:9", api_wait_s=0.2)
    with pytest.raises(ApiLost, match=r"http://127.0.0.1:9 did not come back within 0 s"):
        await env.env_manager()
    assert env.shut == 1


async def test_sizes_that_never_make_a_batch_are_refused_at_the_start(api: RunApi) -> None:
    await asyncio.to_thread(Trainer(api.url, batch_size=8).register)
    env = NumberedEnv(rollout_server_url=api.url, group_size=3)
    with pytest.raises(ConfigError, match="groups of 3 never fill a batch of 8"):
        await env.env_manager()


async def test_a_trainer_that_gets_nothing_is_told_why_in_a_warning(
    api: RunApi, caplog: pytest.LogCaptureFixture
) -> None:
    await asyncio.to_thread(Trainer(api.url, max_token_len=6).register)
    await asyncio.wait_for(NumberedEnv(items=9, rollout_server_url=api.url, length=6).env_manager(), 20)
    (warning,) = [line.getMessage() for line in caplog.records if "NOTHING IS SENT" in line.getMessage()]
    assert "none of the last 8 groups could be used (8 too_long)" in warning
    assert "max_token_len" in warning


async def test_bad_groups_are_counted_by_reason_and_not_sent(api: RunApi) -> None:
    await asyncio.to_thread(Trainer(api.url, max_token_len=6).register)
    env = NumberedEnv(items=3, rollout_server_url=api.url, length=6)
    await asyncio.wait_for(env.env_manager(), 20)
    assert env.counts.rejected == {"too_long": 3}
    assert env.outbox is not None
    assert env.outbox.delivery.groups == 0


async def test_a_failing_group_harms_no_other(api: RunApi) -> None:
    trainer = Trainer(api.url)
    await asyncio.to_thread(trainer.register)

    class Failing(NumberedEnv):
        async def collect_trajectories(self, item: int):  # type: ignore[no-untyped-def]
            if len(self.started) == 1:
                self.started.append(item)
                raise RuntimeError("boom")
            return await super().collect_trajectories(item)

    env = Failing(items=5, rollout_server_url=api.url)
    await asyncio.wait_for(env.env_manager(), 20)
    assert (env.counts.failed, env.counts.finished) == (1, 4)
    await train(trainer, 2)


async def test_an_environment_that_leaves_does_not_keep_its_share_of_the_batch(api: RunApi, stop: Stop) -> None:
    """With a guaranteed share run-api waits for an environment for ever, unless it says goodbye."""
    trainer = Trainer(api.url)
    await asyncio.to_thread(trainer.register)
    leaving = NumberedEnv(items=1, rollout_server_url=api.url, min_batch_allocation=0.5)
    staying = NumberedEnv(rollout_server_url=api.url)
    await asyncio.wait_for(leaving.env_manager(), 20)
    serving = asyncio.create_task(staying.env_manager())
    await train(trainer, 3)
    await stop_serving(staying, serving, stop)
    assert set(leaving.started) <= set(delivered(trainer))


async def test_a_group_that_arrives_while_run_api_is_asked_is_not_replaced_by_one_too_many() -> None:
    """The queue holds one batch of two groups: whatever the moment of delivery, two groups are started."""
    stop, started, asked = Stop(), [], asyncio.Event()
    outbox = SimpleNamespace(unsent=0, queued=0)

    class Link:
        registration = SimpleNamespace(starting_step=0)
        epoch = 1

        async def status(self) -> EnvStatus:
            seen = EnvStatus(current_step=0, queue_size=outbox.queued)
            if outbox.unsent:  # the answer is on its way while the group is delivered
                outbox.unsent, outbox.queued = 0, 1
                asked.set()
            return seen

    async def next_item() -> int:
        started.append(len(started))
        return started[-1]

    async def run_group(item: int) -> None:
        if item == 0:
            outbox.unsent = 1
        else:
            await asyncio.Event().wait()

    async def pace() -> Pace:
        return Pace(group_size=4, batch_size=8, max_batches_offpolicy=1, max_workers=8)

    async def nothing(*_: object) -> None:
        return None

    outbox.drain = nothing
    hooks = ServeHooks(next_item, run_group, nothing, nothing, lambda _: None, pace)
    settings = AtroposEnvConfig(total_steps=-1, drain_timeout_s=0.0, status_poll_s=0.01)
    serving = asyncio.create_task(ServeLoop(Link(), outbox, settings, hooks, stop).run())
    await asked.wait()
    await asyncio.sleep(0.1)
    assert started == [0, 1]
    stop.ask("test")
    await asyncio.wait_for(serving, 10)
