"""Two ways to read a prompt once for several answers.

`Merger` joins requests for the same prompt. Requests of one group (`hermes_group` members, told apart by
`hermes_group_id`) wait for each other; those whose seeds follow one another are then sent as one with `n_cmpl`.
llama.cpp gives its answers the seeds s, s+1, ..., so that each request gets the very tokens it would have got alone.

`SharedPrefix` is the beginning that all prompts of a run share, read once per weights and put back before each request.
llama.cpp's own prompt cache depends on what was asked before, and so do the last digits of its logprobs. Here the
shared beginning is read alone, its state saved, and slot 0 set to exactly that state before a prompt goes on from it:
as fast as the cache, and the same tokens whatever came before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import orjson

from agent_loop.model.backends.backend import GROUP, GROUP_ID
from sandbox_pool.owned_folders import make_owned_folder
from sandbox_pool.server.host_files import remove_tree

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


SLOT = 0
WORTH_TOKENS = 16
"""A shorter beginning is read again each time."""

Post = Callable[[str, dict[str, Any]], Awaitable[Any]]


class SharedPrefix:
    """The token ids of the beginning, and the folder of its saved states (one per version of the weights)."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._folder = make_owned_folder("prefix-")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        remove_tree(self._folder)

    @property
    def folder(self) -> str:
        """Where the server keeps the states; it wants a slash at the end."""
        return f"{self._folder}/"

    def set(self, ids: Sequence[int]) -> None:
        """Another beginning; the servers have to read it before it is used."""
        self._ids = list(ids) if len(ids) >= WORTH_TOKENS else []

    async def read(self, post: Post, version: str) -> None:
        """Have a server read it and keep the state."""
        if self._ids:
            await post("/completion", {"prompt": self._ids, "n_predict": 0, "id_slot": SLOT, "cache_prompt": False})
            await post(f"/slots/{SLOT}?action=save", {"filename": _name(version)})

    async def use(self, post: Post, version: str, body: dict[str, Any]) -> None:
        """Set the slot to the beginning, and the request to go on from there; other prompts are read whole."""
        prompt, length = body.get("prompt"), len(self._ids)
        known = isinstance(prompt, list) and len(prompt) > length > 0 and prompt[:length] == self._ids
        if known and (self._folder / _name(version)).exists():
            await post(f"/slots/{SLOT}?action=restore", {"filename": _name(version)})
            body |= {"id_slot": SLOT, "cache_prompt": True}
        else:
            body["cache_prompt"] = False

    def forget(self, version: str) -> None:
        """Weights that no longer serve."""
        (self._folder / _name(version)).unlink(missing_ok=True)


def common_prefix(prompts: Iterable[Sequence[int]]) -> list[int]:
    """What all prompts begin with; nothing when there are fewer than two different ones."""
    different = {tuple(prompt) for prompt in prompts}
    if len(different) < 2:
        return []
    low, high = min(different), max(different)
    length = next((n for n, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return list(low[:length])


def _name(version: str) -> str:
    return f"{version}.state"
