"""`serve --workers N`: processes that play the groups of one environment, for machines with more cores than one event
loop can use.

The process that was started keeps everything there is one of: items, run-api, pool, run folder, status, evaluation. A
worker is the same command again; it gets one item at a time for each group it plays, leases from the same pool, and
hands back the encoded group, the records and the figures. An item goes to one worker. When that dies before anything of
the group was handed over, the item is played again by another, and the worker is started again.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from agent_loop import own_process
from environments.atropos.groups import Group
from environments.atropos.outbox import EncodedGroup, encode_ahead
from environments.errors import ConfigError, RunFailed
from environments.launch import WORKER
from sandbox_pool.client.connection import TaskSet
from sandbox_pool.pool.lent_pool import HostRelay, LentPool, PoolLender
from sandbox_pool.pool.pool import SlotPool
from sandbox_pool.process_channel import Channel, OtherEnded

if TYPE_CHECKING:
    from environments.base import HermesAgentBaseEnv
    from environments.rollouts.rollouts import RolloutStats

log = logging.getLogger(__name__)

ITEM_TRIES = 3
"""An item that was under way in so many workers that died is given up: perhaps it is what kills them."""
START_TRIES = 3
START_AGAIN_S = 1.0
END_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Told:
    """What a worker is told with an item."""

    item: Any
    max_token_len: int
    step: int


@dataclass
class Played:
    """What playing an item gave, apart from the groups and records, which were handed over meanwhile."""

    rejected: Counter[str] = field(default_factory=Counter)
    completion_lengths: list[int] = field(default_factory=list)
    backlog: list[Any] = field(default_factory=list)
    stats: RolloutStats | None = None
    tokens: tuple[int, int] = (0, 0)
    """Sampled, and handed on for delivery."""
    segments_waiting: int = 0
    probes: tuple[int, int] = (0, 0)
    failed_items: list[tuple[str, str]] = field(default_factory=list)


class _Worker:
    """One process, as the first one sees it."""

    def __init__(self, workers: Workers, number: int) -> None:
        self.number = number
        self.began = False
        """Whether it was ever ready to play."""
        self.failure: Exception | None = None
        self.deliveries: dict[int, list[asyncio.Task[None]]] = {}
        """Of each group it plays: what it handed over."""
        self.segments_waiting = 0
        self._workers = workers
        self._lender = PoolLender(workers.pool)
        self.channel = Channel(self._answer)
        self.process: asyncio.subprocess.Process | None = None

    @property
    def ready(self) -> bool:
        """Whether it can be given items."""
        return self.began and not self.channel.ended.is_set()

    async def start(self) -> None:
        """Start the process; it tells when it is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            await self.channel.open(ours)
            owned = [sys.executable, "-P", str(Path(own_process.__file__)), str(os.getpid())]
            self.process = await asyncio.create_subprocess_exec(
                *owned,
                *self._workers.command,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, WORKER: f"{theirs.fileno()}:{self.number}"},
                start_new_session=True,  # Ctrl-C is for the first process, which lets the others finish
            )

    async def ended(self) -> int:
        """Wait for its end, and take back what it held; the exit code."""
        assert self.process is not None
        code = await self.process.wait()
        await self.channel.close()
        await self._lender.take_back()
        return code

    async def end(self) -> None:
        """Have it close what it has open; SIGKILL when it takes too long."""
        await self.channel.close()
        if self.process is None:
            return
        try:
            await asyncio.wait_for(self.process.wait(), END_TIMEOUT_S)
        except TimeoutError:
            self.process.send_signal(signal.SIGKILL)
        await self.ended()

    async def play(self, group: int, told: Told) -> Played:
        """Have it play an item. OtherEnded when it died before anything of the group was handed over."""
        self.deliveries[group] = []
        try:
            played: Played = await self.channel.call("play", group, told)
        except OtherEnded:
            if not self.deliveries[group]:
                raise
            await asyncio.gather(*self.deliveries[group])
            return Played()
        finally:
            del self.deliveries[group]
        self.segments_waiting = played.segments_waiting
        return played

    async def _answer(self, name: str, *arguments: Any) -> Any:
        match name:
            case "hello":
                return self._workers.facts
            case "ready":
                await self._workers.check_config(*arguments)
                self.began = True
                await self._workers.changed()
            case "failed":
                (self.failure,) = arguments
            case "deliver":
                group, encoded = arguments
                # Kept apart from this request: the worker may die while it waits for room.
                delivery = self._workers.deliver(encoded)
                self.deliveries[group].append(delivery)
                await asyncio.shield(delivery)
            case "save":
                await self._workers.env.keep_lines(*arguments)
            case _:
                return await getattr(self._lender, name)(*arguments)
        return None


class Workers:
    """All of them. Use as an async context manager, wait for `all_ready`, then `play` items."""

    def __init__(self, env: HermesAgentBaseEnv, count: int, command: Sequence[str] | None = None) -> None:
        if not isinstance(env.pool, SlotPool):
            raise ConfigError("--workers needs a pool that is opened from the config")
        self.env = env
        self.pool = env.pool
        self.command = list(command or (sys.executable, *sys.orig_argv[1:]))
        self.restarts = 0
        self._count = count
        self._config = env.public_config()
        self._workers: list[_Worker] = []
        self._failure: Exception | None = None
        self._news = asyncio.Condition()
        self._groups = itertools.count()
        self._tasks = TaskSet()
        self._closing = False
        self._stack = AsyncExitStack()
        self.facts: tuple[str | None, int] = None, count

    async def __aenter__(self) -> Self:
        if (provider := self.pool.relayed()) is not None:
            self.facts = await self._stack.enter_async_context(HostRelay(provider)), self._count
        self._workers = [_Worker(self, number) for number in range(self._count)]
        for number in range(self._count):
            self._tasks.start(self._keep(number))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        self._tasks.cancel()
        await self._tasks.finish()
        await asyncio.gather(*(worker.end() for worker in self._workers))
        await self._stack.aclose()

    async def all_ready(self) -> Self:
        """Wait until each can play; raises what keeps one of them from it."""
        async with self._news:
            await self._news.wait_for(lambda: self._failure or all(worker.ready for worker in self._workers))
        if self._failure is not None:
            raise self._failure
        return self

    async def changed(self) -> None:
        """A worker came or went: whoever waits for one looks again."""
        async with self._news:
            self._news.notify_all()

    async def check_config(self, config: dict[str, Any]) -> None:
        """ConfigError when a worker that was started later read another config."""
        if config != self._config:
            raise ConfigError("the config was changed since serve was started: start it again")

    def deliver(self, group: EncodedGroup) -> asyncio.Task[None]:
        """Hand a group to the outbox, whatever happens to the worker that brought it."""
        assert self.env.send_group is not None
        return self._tasks.start(self.env.hand_over(group))

    async def play(self, item: Any) -> Played:
        """Have a worker play the item: one of those that play least. RuntimeError when several died with it."""
        env = self.env
        told = Told(env.item_to_json(item), env.max_token_len, env.curr_step)
        for _ in range(ITEM_TRIES):
            worker = await self._next()
            try:
                return await worker.play(next(self._groups), told)
            except OtherEnded:
                continue
        raise RuntimeError(f"item {env.item_id(item)} was under way in {ITEM_TRIES} workers that ended")

    async def _next(self) -> _Worker:
        async with self._news:
            await self._news.wait_for(lambda: self._failure or any(worker.ready for worker in self._workers))
        if self._failure is not None:
            raise self._failure
        return min((worker for worker in self._workers if worker.ready), key=lambda worker: len(worker.deliveries))

    async def _keep(self, number: int) -> None:
        """Start a worker, and again whenever it ends."""
        failed = 0
        while self._failure is None:
            worker = self._workers[number] = _Worker(self, number)
            await worker.start()
            await worker.channel.ended.wait()
            said = f"worker {number} ended ({how(await worker.ended())})"
            failed = 0 if worker.began else failed + 1
            if worker.failure is not None:
                self._failure = worker.failure
            elif failed == START_TRIES:
                self._failure = RunFailed(f"{said} before it could play, {START_TRIES} times: its log lines say why")
            else:
                log.warning("%s: what it had under way is played again, and it is started again", said)
                self.restarts += 1
                await asyncio.sleep(START_AGAIN_S * failed)
            await self.changed()

    @property
    def segments_waiting(self) -> int:
        """Segments that workers hold back until they fill a group."""
        return sum(worker.segments_waiting for worker in self._workers)

    def status_facts(self) -> dict[str, Any]:
        """For the status of the run."""
        return {
            "workers": [
                {"pid": worker.process.pid, "ready": worker.ready, "groups": len(worker.deliveries)}
                for worker in self._workers
                if worker.process is not None
            ],
            "workers_restarted": self.restarts,
        }


def how(code: int) -> str:
    """An exit code in words."""
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def worker_end() -> tuple[socket.socket, int]:
    """In a worker: the way to the process that started it, and its number."""
    descriptor, _, number = os.environ.pop(WORKER).partition(":")
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    return end, int(number)


_group: contextvars.ContextVar[int] = contextvars.ContextVar("group")


async def work(env: HermesAgentBaseEnv, end: socket.socket, number: int) -> None:
    """A worker's life: open what rollouts need, play what it is given, end with the process that started it."""
    for ignored in (signal.SIGTERM, signal.SIGINT):  # a scheduler may send them to all; the first process decides
        signal.signal(ignored, signal.SIG_IGN)
    playing = _Playing(env)
    channel = playing.channel
    await channel.open(end)
    try:
        relay, count = await channel.call("hello")
        pool = env.pool = LentPool(channel, env.config.pool_config(), relay)
        env.rollouts.number_from(number, count)
        config = env.public_config()
        env.send_group, env.keep_lines = playing.send_group, playing.keep_lines
        await env.open_up()
        await env.setup()
        await channel.call("ready", config)
    except OtherEnded:
        return
    except (ConfigError, RunFailed) as error:
        await channel.call("failed", error)
        return
    else:
        await channel.ended.wait()
        await channel.close()
        await pool.close()
    finally:
        await env.shut_down()


class _Playing:
    """Answers the first process in a worker."""

    def __init__(self, env: HermesAgentBaseEnv) -> None:
        self.channel = Channel(self._answer)
        self._env = env

    async def _answer(self, name: str, group: int, told: Told) -> Played:
        assert name == "play"
        env = self._env
        env.max_token_len, env.curr_step = told.max_token_len, told.step
        _group.set(group)
        await env.play(env.item_from_json(told.item))
        return env.take_played()

    async def send_group(self, group: Group | EncodedGroup) -> None:
        """What the outbox is elsewhere."""
        assert not isinstance(group, EncodedGroup)
        await self.channel.call("deliver", _group.get(), await asyncio.to_thread(encode_ahead, group))

    async def keep_lines(self, lines: bytes) -> None:
        """The first process is the only one that writes in the run folder."""
        await self.channel.call("save", lines)
