"""Calls between two processes: answers, errors, cancelling, and the end of one of them. Both ends are in this test."""

import asyncio
import contextlib
import socket

import pytest

from sandbox_pool.process_channel import Channel, OtherEnded
from support.pool_wait import eventually


class Foreign(Exception):
    """Cannot be made again from what it is pickled as."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Answering:
    """What the other end does."""

    def __init__(self):
        self.begun, self.cancelled, self.noted = [], [], []
        self.gate = asyncio.Event()

    async def __call__(self, name, *arguments):
        self.begun.append(name)
        match name:
            case "add":
                return sum(arguments)
            case "fail":
                raise ValueError("no such thing")
            case "foreign":
                raise Foreign("one", "two")
            case "unpicklable":
                return lambda: None
            case "note":
                self.noted += arguments
            case "wait":
                try:
                    await self.gate.wait()
                except asyncio.CancelledError:
                    self.cancelled.append(name)
                    raise
                return "waited"
        return None


@pytest.fixture
async def ends():
    ours, theirs = socket.socketpair()
    there = Answering()
    near, far = Channel(Answering()), Channel(there)
    await near.open(ours)
    await far.open(theirs)
    yield near, far, there
    await near.close()
    await far.close()


async def test_answers_and_errors_come_back(ends):
    near, far, _ = ends
    assert await asyncio.gather(*(near.call("add", n, 1) for n in range(50))) == [n + 1 for n in range(50)]
    assert await far.call("add", b"x" * 10 == b"", 2) == 2
    with pytest.raises(ValueError, match="no such thing") as raised:
        await near.call("fail")
    assert any("Traceback" in note for note in raised.value.__notes__)


async def test_what_cannot_be_sent_is_told_in_words(ends):
    near, _, _ = ends
    with pytest.raises(RuntimeError, match="Foreign: one and two"):
        await near.call("foreign")
    with pytest.raises(Exception, match="pickle"):
        await near.call("unpicklable")
    assert await near.call("add", 1, 1) == 2


async def test_large_things_pass(ends):
    near, _, there = ends
    near.post("note", b"x" * (20 << 20))
    assert await near.call("add", 1) == 1
    assert [len(noted) for noted in there.noted] == [20 << 20]


async def test_what_was_posted_is_begun_before_later_calls(ends):
    near, _, there = ends
    near.post("note", 1)
    near.post("note", 2)
    await near.call("add", 1)
    assert there.begun == ["note", "note", "add"]


async def test_a_cancelled_call_is_cancelled_at_the_other_end(ends):
    near, _, there = ends
    call = asyncio.create_task(near.call("wait"))
    await eventually(lambda: there.begun)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert there.cancelled == ["wait"]
    assert await near.call("add", 1) == 1


async def test_an_answer_that_nobody_took_is_reclaimed(ends):
    near, _, there = ends
    got = []
    call = asyncio.create_task(near.call("wait", reclaim=got.append))
    await eventually(lambda: there.begun)
    there.gate.set()
    await eventually(lambda: (near._calls and all(answer.done() for answer in near._calls.values())) or call.done())
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        got.append(await call)
    assert got == ["waited"]


async def test_the_end_of_the_other_process_ends_its_calls(ends):
    near, far, there = ends
    calls = [asyncio.create_task(near.call("wait")) for _ in range(2)]
    await eventually(lambda: len(there.begun) == 2)
    await far.close()
    for call in calls:
        with pytest.raises(OtherEnded):
            await call
    await asyncio.wait_for(near.ended.wait(), 10)
    assert there.cancelled == ["wait", "wait"]
    with pytest.raises(OtherEnded):
        await near.call("add", 1)
    with pytest.raises(OtherEnded):
        near.post("note", 1)
