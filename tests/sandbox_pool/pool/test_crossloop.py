import asyncio
import contextlib
import threading

import pytest

from sandbox_pool.errors import PoolClosed
from sandbox_pool.pool.pool import call_in_loop
from sandbox_pool.pool.sync import LoopThread


@pytest.fixture
def home():
    thread = LoopThread("home")
    yield thread
    thread.stop()


async def test_the_call_runs_in_the_other_loop_and_its_result_comes_back(home):
    async def where():
        return threading.current_thread().name

    assert await call_in_loop(home.loop, where, lambda _: None) == "home"


async def test_in_the_same_loop_it_is_a_plain_call():
    async def where():
        return threading.current_thread()

    assert await call_in_loop(asyncio.get_running_loop(), where, lambda _: None) is threading.current_thread()


async def test_an_error_comes_back_as_itself(home):
    async def fail():
        raise KeyError("x")

    with pytest.raises(KeyError):
        await call_in_loop(home.loop, fail, lambda _: None)


async def test_a_call_cancelled_over_there_is_an_error_here_not_a_cancellation(home):
    async def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(PoolClosed):
        await call_in_loop(home.loop, cancelled, lambda _: None)


async def test_cancelling_the_caller_cancels_the_call(home):
    begun, ended = threading.Event(), threading.Event()

    async def long():
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    task = asyncio.create_task(call_in_loop(home.loop, long, lambda _: None))
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(ended.wait, 10)


async def test_a_result_that_comes_although_the_caller_was_cancelled_is_reclaimed(home):
    begun, reclaimed = threading.Event(), []
    done = threading.Event()

    async def stubborn():
        begun.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return "slot"

    def reclaim(result):
        reclaimed.append(result)
        done.set()

    task = asyncio.create_task(call_in_loop(home.loop, stubborn, reclaim))
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(done.wait, 10)
    assert reclaimed == ["slot"]


async def test_every_result_is_either_taken_or_reclaimed_however_the_race_ends(home):
    made, reclaimed, taken = [], [], []

    async def make(n):
        await asyncio.sleep(0)
        made.append(n)
        return n

    for n in range(300):
        task = asyncio.create_task(call_in_loop(home.loop, lambda n=n: make(n), reclaimed.append))
        for _ in range(n % 7):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            taken.append(await task)

    async def settle():
        for _ in range(20):
            await asyncio.sleep(0)

    await asyncio.to_thread(home.run, settle())
    assert sorted(taken + reclaimed) == sorted(made)
    assert len(set(taken) & set(reclaimed)) == 0
