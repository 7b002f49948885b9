"""Joins requests for the same prompt into one, so that llama.cpp reads the prompt once and samples several answers.

Requests of one group (`hermes_group` members, told apart by `hermes_group_id`) wait for each other; those whose seeds
follow one another are then sent as one with `n_cmpl`. llama.cpp gives its answers the seeds s, s+1, ..., so that each
request gets the very tokens it would have got alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from agent_loop.model.backends.backend import GROUP, GROUP_ID

SEED = "seed"

Body = dict[str, Any]
Send = Callable[[Body], Awaitable[Any]]
"""Sends one request; the answer is an object, or a list with `n_cmpl`."""


@dataclass
class _Member:
    seed: int | None
    share: asyncio.Future[tuple[asyncio.Task[list[Any]], int]]
    """The request that went out for it, and which of the answers is its own."""


@dataclass
class _Waiting:
    """Requests of one group that came so far."""

    body: Body
    send: Send
    members: list[_Member] = field(default_factory=list)
    timer: asyncio.Task[None] | None = None


class Merger:
    """One per server. `widest` is the most answers of one request: the server's slots."""

    def __init__(self, widest: int, wait_s: float) -> None:
        self._widest = widest
        self._wait_s = wait_s
        self._waiting: dict[bytes, _Waiting] = {}
        self._sending: set[asyncio.Task[list[Any]]] = set()

    async def ask(self, body: Body, send: Send, may_go: Callable[[], Awaitable[None]]) -> Any:
        """The answer to one request of a group. `may_go` holds the clock: latecomers are waited for only after it."""
        body = dict(body)
        wanted = int(body.pop(GROUP))
        seed = body.pop(SEED, None)
        key = orjson.dumps([wanted, body], option=orjson.OPT_SORT_KEYS)
        body.pop(GROUP_ID, None)
        member = _Member(seed, asyncio.get_running_loop().create_future())
        waiting = self._waiting.setdefault(key, _Waiting(body, send))
        waiting.members.append(member)
        if waiting.timer is not None:
            waiting.timer.cancel()
            waiting.timer = None
        if len(waiting.members) >= wanted:
            self._dispatch(key)
        else:
            waiting.timer = asyncio.create_task(self._give_up(key, may_go))
        sending, place = await member.share
        return (await asyncio.shield(sending))[place]

    async def close(self) -> None:
        """Stop waiting; whoever still waits is cancelled."""
        timers = [waiting.timer for waiting in self._waiting.values() if waiting.timer is not None]
        tasks = [*timers, *self._sending]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for waiting in self._waiting.values():
            for member in waiting.members:
                member.share.cancel()

    async def _give_up(self, key: bytes, may_go: Callable[[], Awaitable[None]]) -> None:
        """A member may have been lost on its way: the others go on without it."""
        await may_go()
        await asyncio.sleep(self._wait_s)
        self._dispatch(key)

    def _dispatch(self, key: bytes) -> None:
        waiting = self._waiting.pop(key)
        for run in consecutive(waiting.members, self._widest):
            sending = asyncio.create_task(_send_run(waiting, [member.seed for member in run]))
            self._sending.add(sending)
            sending.add_done_callback(self._sending.discard)
            for place, member in enumerate(run):
                if not member.share.cancelled():
                    member.share.set_result((sending, place))


def consecutive(members: Sequence[_Member], widest: int) -> list[list[_Member]]:
    """Cut the members, in order of their seeds, wherever a seed does not follow the one before."""
    runs: list[list[_Member]] = []
    for member in sorted(members, key=lambda m: -1 if m.seed is None else m.seed):
        last = runs[-1][-1] if runs else None
        follows = last is not None and (
            last.seed is None if member.seed is None else last.seed is not None and last.seed + 1 == member.seed
        )
        if follows and len(runs[-1]) < widest:
            runs[-1].append(member)
        else:
            runs.append([member])
    return runs


async def _send_run(waiting: _Waiting, seeds: Sequence[int | None]) -> list[Any]:
    """One answer for each seed, in their order."""
    body = dict(waiting.body)
    if seeds[0] is not None:
        body[SEED] = seeds[0]
    if len(seeds) > 1:
        body["n_cmpl"] = len(seeds)
    answer = await waiting.send(body)
    answers = sorted(answer, key=lambda one: int(one["index"])) if isinstance(answer, list) else [answer]
    if len(answers) != len(seeds):
        raise ValueError(f"the server gave {len(answers)} answers for {len(seeds)} requests")
    return answers
