"""Delivery of finished groups to run-api: in order, one at a time, each taken exactly once or counted.

Encoding and compression happen in a thread. A group stays here until run-api has said that it took it. When the
answer is lost, we look instead of guessing: with a new run-api the group is sent again (the old queue died with the
old process, and it answers a POST before it can hand the group to anybody); with the same run-api its latest group
tells. Where even that is silent, the group is counted as uncertain and not sent again, because a sample trained twice
is a wrong sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from agent_loop.model.tokens.ledger import MASKED
from environments.atropos.api import ApiBroken, ApiDown, ApiLink, ApiRefused, Unanswered
from environments.atropos.groups import ROW_KEYS, Group

GZIP = 31
"""zlib's window bits for a gzip header and trailer."""


@dataclass(frozen=True)
class EncodedGroup:
    """A group that another process encoded, apart from the number under which run-api knows us."""

    group_id: str | None
    sequences: int
    trained_tokens: int
    body: bytes


def encode_ahead(group: Group) -> EncodedGroup:
    """Encode all of a group but the end. Pure and slow: call it in a thread."""
    return EncodedGroup(_group_id(group), len(group["tokens"]), _trained(group), b"".join(_pieces(group))[:-1])


def encode_group(group: Group | EncodedGroup, env_id: int | None, *, compress: bool = True) -> bytes:
    """The body of POST /scored_data. Pure and slow: call it in a thread. Compressing is three quarters of it."""
    if isinstance(group, EncodedGroup):
        pieces = iter((group.body, b',"env_id":', orjson.dumps(env_id), b"}"))
    else:
        pieces = _pieces({**group, "env_id": env_id})
    if not compress:
        return b"".join(pieces)
    compressor = zlib.compressobj(1, zlib.DEFLATED, GZIP)
    body = [compressor.compress(piece) for piece in pieces]
    body.append(compressor.flush())
    return b"".join(body)


def _pieces(group: dict[str, Any]) -> Iterator[bytes]:
    opening = b"{"
    for key, value in group.items():
        yield opening + orjson.dumps(key) + b":"
        opening = b","
        if value is not None and key in (*ROW_KEYS, "messages"):
            yield b"["
            for index, row in enumerate(value):
                yield (b"," if index else b"") + orjson.dumps(row)
            yield b"]"
        else:
            yield orjson.dumps(value)
    yield b"}"


log = logging.getLogger(__name__)

BROKEN_TRIES = 5
RETRY_PAUSE_S = 0.5

Verdict = Literal["taken", "not_taken", "unknown"]


@dataclass
class Delivery:
    """What became of the groups handed to the outbox."""

    groups: int = 0
    sequences: int = 0
    trained_tokens: int = 0
    refused: int = 0
    uncertain: int = 0
    undelivered: int = 0


class Outbox:
    """Holds at most `capacity` unsent groups; `put` waits when it is full. Use as an async context manager."""

    def __init__(self, link: ApiLink, capacity: int = 8) -> None:
        self.delivery = Delivery()
        self._link = link
        self._queue: asyncio.Queue[Group | EncodedGroup] = asyncio.Queue(capacity)
        self._sender: asyncio.Task[None] | None = None
        self._in_hand = 0
        self._last_taken: str | None = None

    @property
    def unsent(self) -> int:
        """Groups that run-api has not taken yet."""
        return self._queue.qsize() + self._in_hand

    async def __aenter__(self) -> Outbox:
        self._sender = asyncio.create_task(self._send_all(), name="outbox")
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._sender is not None:
            self._sender.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):  # its fault was raised by put or drain
                await self._sender
        self.delivery.undelivered = self.unsent

    async def put(self, group: Group | EncodedGroup) -> None:
        """Take a checked group for delivery; raises what stopped the sender if it has stopped."""
        await self._unless_sender_fails(self._queue.put(group))

    async def drain(self, timeout_s: float) -> None:
        """Wait until everything is delivered, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._unless_sender_fails(self._queue.join()), timeout_s)

    async def _unless_sender_fails(self, work: Coroutine[Any, Any, None]) -> None:
        if self._sender is None:
            raise RuntimeError("Outbox is used inside `async with`")
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._sender}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._sender.result()
        finally:
            task.cancel()

    async def _send_all(self) -> None:
        while True:
            group = await self._queue.get()
            self._in_hand = 1
            await self._send(group)
            self._in_hand = 0
            self._queue.task_done()

    async def _send(self, group: Group | EncodedGroup) -> None:
        broken = 0
        while True:
            epoch = self._link.epoch
            far = not self._link.api.on_this_machine
            body = await asyncio.to_thread(encode_group, group, self._link.registration.env_id, compress=far)
            # Right before the POST: a run-api that has no trainer yet would be broken for good by a group.
            await self._link.status()
            if self._link.epoch != epoch:
                continue
            try:
                await self._link.api.send_group(body)
                return self._taken(group)
            except ApiRefused as error:
                self.delivery.refused += 1
                log.error("run-api refused a group: %s", error)
                return None
            except ApiBroken as error:
                broken += 1
                if broken == BROKEN_TRIES:
                    self.delivery.refused += 1
                    log.error("run-api failed %d times on a group: %s", broken, error)
                    return None
            except ApiDown as error:
                log.debug("%s", error)
            except Unanswered as error:
                verdict = await self._look(group, epoch)
                log.warning("%s; group %s: %s", error, _group_id(group), verdict)
                if verdict == "taken":
                    return self._taken(group)
                if verdict == "unknown":
                    self.delivery.uncertain += 1
                    return None
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _look(self, group: Group | EncodedGroup, epoch: int) -> Verdict:
        """Did run-api take this group although its answer got lost?"""
        await self._link.status()
        if self._link.epoch != epoch:
            return "not_taken"
        latest = await self._link.api.latest_group_id()
        if latest == _group_id(group):
            return "taken"
        if latest == self._last_taken:
            return "not_taken"
        return "unknown"

    def _taken(self, group: Group | EncodedGroup) -> None:
        self._last_taken = _group_id(group)
        self.delivery.groups += 1
        if isinstance(group, EncodedGroup):
            sequences, trained = group.sequences, group.trained_tokens
        else:
            sequences, trained = len(group["tokens"]), _trained(group)
        self.delivery.sequences += sequences
        self.delivery.trained_tokens += trained


def _trained(group: Group) -> int:
    return sum(len(masks) - masks.count(MASKED) for masks in group["masks"])


def _group_id(group: Group | EncodedGroup) -> str | None:
    if isinstance(group, EncodedGroup):
        return group.group_id
    params = group.get("generation_params")
    return params.get("group_id") if isinstance(params, dict) else None
