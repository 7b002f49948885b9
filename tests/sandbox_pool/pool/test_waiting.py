import asyncio

from sandbox_pool.pool.lease import Waiter, WaitQueue
from sandbox_pool.spec import SandboxSpec


def waiter(key="a", task_id="t", since_s=0.0):
    return Waiter(key, SandboxSpec(), task_id, None, asyncio.get_running_loop().create_future(), since_s)


async def test_first_come_first_served_per_key():
    queue = WaitQueue()
    first, second, other = waiter("a"), waiter("a"), waiter("b")
    for each in (first, second, other):
        queue.push(each)
    assert queue.head("a") is first
    first.granted.set_result(None)
    assert queue.head("a") is second
    assert queue.head("b") is other


async def test_the_cancelled_and_the_served_are_skipped_and_not_counted():
    queue = WaitQueue()
    gone, stays = waiter(), waiter()
    queue.push(gone)
    queue.push(stays)
    gone.granted.cancel()
    assert queue.count("a") == 1
    assert queue.head("a") is stays


async def test_one_who_lost_the_slot_on_the_way_comes_first_again():
    queue = WaitQueue()
    early, late = waiter(), waiter()
    queue.push(late)
    queue.push_front(early)
    assert queue.head("a") is early


async def test_keys_are_ordered_by_the_longest_wait():
    queue = WaitQueue()
    queue.push(waiter("young", since_s=5.0))
    queue.push(waiter("old", since_s=1.0))
    assert queue.waited_keys() == ["old", "young"]


async def test_leaving_the_line_twice_does_no_harm():
    queue = WaitQueue()
    leaving = waiter()
    queue.push(leaving)
    queue.remove(leaving)
    queue.remove(leaving)
    assert queue.head("a") is None
    assert queue.waited_keys() == []


async def test_an_error_reaches_all_who_wait_for_that_key_only():
    queue = WaitQueue()
    hit, spared = waiter("a"), waiter("b")
    queue.push(hit)
    queue.push(spared)
    queue.fail(ValueError("no"), "a")
    assert isinstance(hit.granted.exception(), ValueError)
    assert not spared.granted.done()
