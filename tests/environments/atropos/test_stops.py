"""Signals as two events."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from environments.atropos.stops import Stop


async def test_the_first_signal_drains_and_the_second_stops_at_once() -> None:
    stop = Stop()
    with stop.on_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(stop.draining.wait(), 5)
        assert not stop.now.is_set()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.wait_for(stop.now.wait(), 5)


async def test_handlers_are_gone_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop().on_signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) in (before, signal.SIG_DFL)


async def test_work_is_cancelled_by_a_stop_and_otherwise_left_alone() -> None:
    stop = Stop()
    assert await stop.unless_draining(asyncio.sleep(0, "done")) == "done"
    asyncio.get_running_loop().call_later(0.05, stop.ask, "test")
    assert await asyncio.wait_for(stop.unless_draining(asyncio.sleep(60, "late")), 5) is None


async def test_a_fault_of_the_work_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        await Stop().unless_draining(fail())
