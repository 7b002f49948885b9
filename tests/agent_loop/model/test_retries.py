"""Retries: what is tried again, how often, and with which pauses."""

from __future__ import annotations

import pytest

from agent_loop.model.contract import ModelRefused, ModelUnavailable
from agent_loop.model.errors import RetryPolicy, with_retries


async def test_only_transport_faults_are_tried_again():
    tries: list[int] = []

    async def refuse() -> None:
        tries.append(1)
        raise ModelRefused("400")

    with pytest.raises(ModelRefused):
        await with_retries(refuse, RetryPolicy(base_s=0))
    assert len(tries) == 1


async def test_the_last_failure_is_raised_after_all_attempts():
    tries: list[int] = []

    async def fail() -> None:
        tries.append(1)
        raise ModelUnavailable(f"try {len(tries)}")

    with pytest.raises(ModelUnavailable, match="try 4"):
        await with_retries(fail, RetryPolicy(attempts=4, base_s=0))


def test_pauses_grow_to_the_cap_and_are_spread_by_jitter():
    policy = RetryPolicy(base_s=1, cap_s=5)
    assert [policy.pause_s(n, 1.0) for n in (1, 2, 3, 4, 100)] == [1, 2, 4, 5, 5]
    assert policy.pause_s(3, 0.25) == 1.0
    assert policy.pause_s(1, 0.0, asked_s=3.0) == 3.0
    assert policy.pause_s(1, 0.0, asked_s=600.0) == 5.0
    with pytest.raises(ValueError, match="attempts"):
        RetryPolicy(attempts=0)
