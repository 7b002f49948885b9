"""TRL 1.16 and later, with exact tokens: our rollouts for AsyncGRPOTrainer.

With vLLM the weights travel as TRL sends them: it pauses the server, sends, and resumes, while requests of ours wait.
`cpu_weights.py` does the same for the CPU server of hermes-rl.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sys
import time
from concurrent.futures import Future
from typing import Any

from environments.errors import RolloutLost
from environments.rollouts.blocking import BlockingRollouts
from environments.rollouts.samples import Sample

log = logging.getLogger(__name__)


class TrlRolloutWorker:
    """`AsyncGRPOTrainer(rollout_worker=TrlRolloutWorker(rollouts))`: groups of the environment's items without end.

    Rollouts that are not open yet are opened when training begins, which only the first of several processes does, and
    closed with it. Leave `temperature` of AsyncGRPOConfig at 1.0: our logprobs are the model's own, whatever it was
    sampled at.
    """

    def __init__(
        self,
        rollouts: BlockingRollouts,
        *,
        group_size: int | None = None,
        groups_at_once: int | None = None,
        waiting: int = 256,
    ) -> None:
        """Sizes default to the environment's settings; `waiting` samples at most wait for the trainer."""
        config = rollouts.rollouts.env.config
        self.rollout_buffer: queue.Queue[Any] = queue.Queue(waiting)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._rollouts = rollouts
        self._group_size = group_size or config.group_size
        self._groups_at_once = groups_at_once or config.groups_at_once
        self._must_differ = config.ensure_scores_are_not_same
        self._longest_s = config.limits.rollout_timeout_s or 0.0
        self._opened_here = False
        self._version = self._groups = 0
        self._running: Future[None] | None = None
        self._producing: asyncio.Task[None] | None = None
        self._last = time.monotonic()

    def start(self) -> None:
        """Begin; TRL calls it after the first weights were sent."""
        if not self._rollouts.opened:
            self._rollouts.__enter__()
            self._opened_here = True
        self._last = time.monotonic()
        self._running = self._rollouts.submit(self._produce())

    def stop(self) -> None:
        """Stop; rollouts that run are cancelled."""
        with self.rollout_buffer.mutex:  # whoever waits for room is let go
            self.rollout_buffer.maxsize = sys.maxsize
            self.rollout_buffer.queue.clear()
            self.rollout_buffer.not_full.notify_all()
        if self._producing is not None:
            self._rollouts.wait(_cancelled(self._producing))
        if self._opened_here:
            self._opened_here = False
            self._rollouts.__exit__(None, None, None)

    def update_model_version(self, model_version: int) -> None:
        """The weights that sample from now on."""
        self._version = model_version
        self._last = time.monotonic()  # sampling was paused meanwhile

    def check_health(self, stale_after_s: float) -> None:
        """RuntimeError when no more rollouts are to be expected. As long as a rollout may take nothing need come."""
        stale_after_s = max(stale_after_s, self._longest_s)
        if self._running is not None and self._running.done():
            raise RuntimeError("the rollouts have ended") from self._running.exception()
        if self.rollout_buffer.empty() and time.monotonic() - self._last > stale_after_s:
            raise RuntimeError(f"no rollout in {stale_after_s:.0f} s")

    async def _produce(self) -> None:
        self._producing = asyncio.current_task()
        taking = asyncio.Lock()

        async def work() -> None:
            while True:
                async with taking:
                    item = await self._rollouts.rollouts.env.next_item()
                if item is None:
                    return
                for row in await self._rows(item):
                    await asyncio.to_thread(self.rollout_buffer.put, row)

        async with asyncio.TaskGroup() as group:
            for _ in range(self._groups_at_once):
                group.create_task(work())

    async def _rows(self, item: Any) -> list[Any]:
        version = self._version  # weights that change meanwhile only make the samples look older than they are
        try:
            samples = await self._rollouts.rollouts.group(item, self._group_size)
        except RolloutLost as lost:
            log.warning("a group is lost: %s", lost)
            self.metrics_queue.put({"hermes/lost_groups_total": 1.0})
            return []
        self._last = time.monotonic()
        scores = {sample.rollout_id: sample.reward for sample in samples}
        if self._must_differ and len(set(scores.values())) == 1:
            self.metrics_queue.put({"hermes/groups_without_signal_total": 1.0})
            return []
        self._groups += 1
        return [trl_sample(sample, self._groups, version) for sample in samples]


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Returns when it has ended, so that nothing is closed under it."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def trl_sample(sample: Sample, group_id: int, model_version: int) -> Any:
    """A sample as TRL's `RolloutSample`."""
    import numpy as np
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    record = sample.record
    first = next((place for place, call in enumerate(record.sampled_by) if call is not None), len(record.messages))
    return RolloutSample(
        prompt=record.messages[:first],
        completion=record.messages[first:],
        input_ids=np.asarray(sample.tokens, np.int64),
        completion_mask=np.asarray(sample.mask, np.int64),
        old_log_probs=np.asarray(sample.logprobs, np.float32),
        advantage=sample.one_advantage(),
        model_version=model_version,
        group_id=group_id,
        metrics={"reward": sample.reward, **{f"rewards/{k}": v for k, v in record.reward_components.items()}},
        enqueued_at=time.time(),
    )
