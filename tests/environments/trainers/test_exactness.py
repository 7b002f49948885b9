"""The judgement of `train-check`, with the stand-in's own logprobs in the place of a trainer's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import pytest

from agent_loop.local_models.standin.sampler import logprobs_of
from environments.rollouts.rollouts import Rollouts
from environments.rollouts.samples import Sample
from environments.trainers.checks.exactness import Control, corrupted, judge
from support.env_pool import DirectoryPool
from support.env_tasks import NumberEnv, right, standin_model

REASONS = {"swapped": "wrong there", "shifted": "one token too late", "wrong": "wrong there"}


class StandInView:
    """The stand-in's logprobs depend on every id before them, as a model's do."""

    def measure(self, samples: Sequence[Sample]) -> tuple[float, float]:
        logs = [
            theirs - ours
            for sample in samples
            for theirs, ours, mask in zip(self.logprobs(sample), sample.logprobs, sample.mask, strict=True)
            if mask
        ]
        ratios = [math.exp(log) for log in logs]
        return sum(ratios) / len(logs), sum(r - 1 - log for r, log in zip(ratios, logs, strict=True)) / len(logs)

    def logprobs(self, sample: Sample) -> list[float]:
        return logprobs_of(sample.tokens)


async def rolled_out() -> list[Sample]:
    pool = DirectoryPool()
    try:
        async with standin_model(right) as (model, _), Rollouts(NumberEnv(pool, model)) as rollouts:
            return await rollouts.group({"id": "x", "number": 7}, 2)
    finally:
        pool.close()


async def test_exact_tokens_pass_and_spoiled_ones_do_not() -> None:
    samples = await rolled_out()
    found = judge(StandInView(), samples)
    assert found.exact
    assert found.sentence().endswith("your tokens are exact")
    assert (found.ratio, found.kl) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))
    for control in get_args(Control):
        spoiled = judge(StandInView(), corrupted(samples, control))
        assert not spoiled.exact
        assert "NOT exact; the largest difference is" in spoiled.sentence()
        if control != "swapped":  # here one id changes all that follow; with a model mostly the next few
            assert REASONS[control] in spoiled.off
