"""`TrlRolloutWorker` as AsyncGRPOTrainer drives it. TRL itself is in tests/live/trl; here is its type of a sample."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from environments.rollouts.blocking import BlockingRollouts
from environments.rollouts.rollouts import Rollouts
from environments.trainers.trl import TrlRolloutWorker
from support.env_pool import DirectoryPool
from support.env_tasks import NumberEnv, right, sometimes_right, standin_model

pytest.importorskip("numpy")


@dataclass
class RolloutSample:
    """The fields of TRL 1.16's."""

    prompt: Any
    completion: Any
    input_ids: Any
    completion_mask: Any
    old_log_probs: Any
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


@pytest.fixture(autouse=True)
def trl(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "trl.experimental.async_grpo.async_rollout_worker"
    for part in range(1, 5):
        module = ModuleType(".".join(name.split(".")[:part]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module.RolloutSample = RolloutSample  # type: ignore[attr-defined]


@pytest.fixture
def pool() -> Iterator[DirectoryPool]:
    made = DirectoryPool()
    yield made
    made.close()


class Opened(NumberEnv):
    """With a model that is opened where the rollouts run."""

    policy = staticmethod(sometimes_right)

    async def open_up(self) -> None:
        self.model, _ = await self._stack.enter_async_context(standin_model(self.policy))
        await super().open_up()


class AlwaysRight(Opened):
    policy = staticmethod(right)


def worker(env: NumberEnv, **sizes: int) -> TrlRolloutWorker:
    sizes = {"groups_at_once": 1, **sizes}
    return TrlRolloutWorker(BlockingRollouts(Rollouts(env)), group_size=4, **sizes)


def test_whole_groups_come_as_trls_samples_with_the_version_of_their_weights(pool: DirectoryPool) -> None:
    rolling = worker(Opened(pool))
    rolling.update_model_version(3)
    rolling.start()
    try:
        rows = [rolling.rollout_buffer.get(timeout=60) for _ in range(4)]
    finally:
        rolling.stop()
    assert {row.group_id for row in rows} == {1}
    assert {row.model_version for row in rows} == {3}
    assert sum(row.advantage for row in rows) == pytest.approx(0.0)
    assert len({row.metrics["reward"] for row in rows}) == 2
    for row in rows:
        assert len(row.input_ids) == len(row.completion_mask) == len(row.old_log_probs)
        assert set(row.completion_mask.tolist()) == {0, 1}
        assert (row.old_log_probs[row.completion_mask == 0] == 0).all()
        assert (row.old_log_probs[row.completion_mask == 1] < 0).all()
        assert row.completion[0]["role"] == "assistant"
    assert pool.live == {}, "stop closes what start opened"


def test_a_full_buffer_does_not_keep_it_from_stopping(pool: DirectoryPool) -> None:
    before = set(threading.enumerate())
    rolling = worker(Opened(pool), waiting=1, groups_at_once=4)
    rolling.start()
    rolling.rollout_buffer.get(timeout=60)
    rolling.stop()
    assert pool.live == {}
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
        assert not thread.is_alive(), "a thread that waits for room for ever would keep the process from ending"


def test_groups_without_signal_and_lost_ones_are_counted_and_never_sent(pool: DirectoryPool) -> None:
    rolling = worker(AlwaysRight(pool, rollout_tries=1))
    rolling.start()
    try:
        assert rolling.metrics_queue.get(timeout=60) == {"hermes/groups_without_signal_total": 1.0}
        pool.refuse = ["/0"] * 1000
        while (told := rolling.metrics_queue.get(timeout=60)) == {"hermes/groups_without_signal_total": 1.0}:
            pass
        assert told == {"hermes/lost_groups_total": 1.0}
        assert rolling.rollout_buffer.empty()
    finally:
        rolling.stop()


def test_health_tells_of_an_end_and_of_silence(pool: DirectoryPool) -> None:
    rolling = worker(Opened(pool, limits={"rollout_timeout_s": 1e-9}))
    with pytest.raises(RuntimeError, match="no rollout in 0 s"):
        rolling.check_health(0.0)
    rolling.check_health(3600.0)
    patient = worker(Opened(pool, limits={"rollout_timeout_s": 3600.0}))
    patient.check_health(0.0)  # a rollout may take so long


class Failing(Opened):
    async def get_next_item(self) -> Any:
        raise ValueError("no items here")


def test_what_ended_the_rollouts_is_the_cause_that_trl_shows(pool: DirectoryPool) -> None:
    rolling = worker(Failing(pool))
    rolling.start()
    try:
        assert rolling._running is not None
        rolling._running.exception(timeout=60)
        with pytest.raises(RuntimeError, match="the rollouts have ended") as ended:
            rolling.check_health(3600.0)
        assert "no items here" in repr(ended.value.__cause__)
    finally:
        rolling.stop()
