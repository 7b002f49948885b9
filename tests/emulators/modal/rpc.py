"""From plain methods to a gRPC service: every call is authorized, counted and befallen by the faults of its RPC."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from grpclib import Status

from .faults import error
from .world import World

F = TypeVar("F", bound=Callable[..., Any])
Around = Callable[[Any, Callable[[], Awaitable[Any]]], Awaitable[Any]]
ONCE = ("SandboxCreate", "SandboxCreateV2")
"""Done once per idempotency key, and to the end even when the client has gone."""


def unary(*names: str) -> Callable[[F], F]:
    """The method `(request) -> response` serves these RPCs, V1 and V2 twins among them."""
    return _mark(names, streams=False)


def streaming(*names: str) -> Callable[[F], F]:
    """The method `(request, stream, faults)` serves these RPCs, whose first message is the request."""
    return _mark(names, streams=True)


def _mark(names: tuple[str, ...], *, streams: bool) -> Callable[[F], F]:
    def mark(method: F) -> F:
        method.rpcs, method.streams = names, streams
        return method

    return mark


async def _straight(request: Any, work: Callable[[], Awaitable[Any]]) -> Any:
    return await work()


def service(base: Any, world: World, parts: list[object], authorize: Callable[[Any], None],
            around: Around = _straight) -> Any:  # fmt: skip
    """A servicer of `base`; an RPC that no part serves answers UNIMPLEMENTED. `around` is the network in between."""
    methods: dict[str, Any] = {}
    for part in parts:
        for name in dir(part):
            method = getattr(part, name)
            methods |= dict.fromkeys(getattr(method, "rpcs", ()), method)
    make = _Service(world, authorize, around)
    namespace = {rpc: make.handler(rpc, methods.get(rpc)) for rpc in base.__abstractmethods__}
    return type(f"Emulated{base.__name__}", (base,), namespace)()


class _Service:
    def __init__(self, world: World, authorize: Callable[[Any], None], around: Around) -> None:
        self._world, self._authorize, self._around = world, authorize, around
        self._working: set[asyncio.Task[Any]] = set()

    def handler(self, rpc: str, method: Any) -> Callable[[Any, Any], Awaitable[None]]:
        async def handle(servicer: object, stream: Any) -> None:
            request = await stream.recv_message()
            self._authorize(stream.metadata)
            self._world.calls[rpc] += 1
            self._world.requests.append((rpc, request))
            if method is None:
                raise error(Status.UNIMPLEMENTED, f"{rpc} is not emulated")
            faults = self._world.faults.take(rpc)
            if method.streams:
                await faults.before()
                await self._around(request, lambda: method(request, stream, faults))
                return

            async def work() -> Any:
                await faults.before()
                response = await self._answer(rpc, method, request, stream.metadata)
                await faults.after()
                return response

            if rpc in ONCE:
                task = asyncio.ensure_future(work())
                self._working.add(task)
                task.add_done_callback(self._forget)
                response = await asyncio.shield(task)
            else:
                response = await self._around(request, work)
            await stream.send_message(response)

        return handle

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._working.discard(task)
        if not task.cancelled():
            task.exception()  # seen: when the client has gone there is nobody to tell

    async def _answer(self, rpc: str, method: Any, request: Any, metadata: Mapping[str, str]) -> Any:
        key = (rpc, str(metadata.get("x-idempotency-key") or ""))
        if rpc in ONCE and key[1] and key in self._world.replies:
            return await asyncio.shield(self._world.replies[key])
        answer = asyncio.ensure_future(method(request))
        if rpc in ONCE and key[1]:
            self._world.replies[key] = answer
            answer.add_done_callback(lambda done: self._keep_if_done(key, done))
        return await answer

    def _keep_if_done(self, key: tuple[str, str], answer: asyncio.Future[Any]) -> None:
        if answer.cancelled() or answer.exception() is not None:
            del self._world.replies[key]
