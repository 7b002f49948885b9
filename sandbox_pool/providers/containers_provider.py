"""Hosts that are one container each: of an engine, or a sandbox of a cloud, with a loader in it and a way to reach it.

    start   find the container of this name or create it, reach its loader, send token and slot server
    watch   one task per container; when it ends, the host is lost, with what it returned as the reason
    stop    repeat a create that got no answer, so that the name is taken for certain; then remove the container
    list    every container with our label, whoever started it

How each of these is asked for is all that providers add.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from sandbox_pool.errors import HostStartFailed, PlaceUnreachable, SandboxError
from sandbox_pool.images.image_source import is_for_slots
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext, checked_options
from sandbox_pool.providers.remote_start import load_server, packed_server
from sandbox_pool.spec import SandboxSpec

Records = list[HostRecord]
Container = TypeVar("Container")
Request = TypeVar("Request")
BLOCK = 1 << 16


class ContainerOptions(BaseModel):
    """`provider_options` of all providers whose hosts are containers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str | None = None
    """Image of containers unless a spec names its own. It needs a Python 3.9 or later."""
    python: str = "python3"
    level: str | None = None
    """Build slots at this isolation level instead of the strongest that works in the container."""
    ready_timeout_s: float = Field(default=60.0, gt=0)
    """How long a container may take from its start until its slot server answers."""
    stop_timeout_s: float = Field(default=60.0, gt=0)


OptionsOfContainers = TypeVar("OptionsOfContainers", bound=ContainerOptions)


class ContainersProvider(ABC, Generic[OptionsOfContainers, Request, Container]):
    """Starts slot servers in containers; what makes, finds and removes them is for others to say."""

    adopts = True
    place: ClassVar[str]
    """Where containers are, as an error names it."""
    options_model: type[OptionsOfContainers]
    unreachable: ClassVar[tuple[type[BaseException], ...]]
    """What is raised when the place refuses or does not answer."""

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        self._context = context
        self._options = checked_options(self.options_model, options)
        self._tell_lost: Callable[[str, str], None] = lambda name, reason: None
        self._watches: dict[str, asyncio.Task[str]] = {}
        self._unanswered: dict[str, Request] = {}
        """Containers whose create got no answer -> what was asked for."""
        self._pipes: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def find(self, name: str) -> Container | None:
        """The container of this name, `SandboxLost` when it has ended."""

    @abstractmethod
    async def prepare(self, name: str, spec: SandboxSpec) -> Request:
        """All that a create needs, once the place has it."""

    @abstractmethod
    async def create(self, name: str, request: Request) -> Container:
        """Ask for the container."""

    @abstractmethod
    def refuses(self, error: BaseException) -> bool:
        """Whether the answer to a create says that it made nothing."""

    @abstractmethod
    def is_taken(self, error: BaseException) -> bool:
        """Whether the answer to a create says that there is a container of this name."""

    @abstractmethod
    async def reach(self, name: str, container: Container, spec: SandboxSpec) -> Host:
        """Start it and its loader, unless they run; the host at the address for `dial`."""

    @abstractmethod
    async def ended(self, name: str, container: Container) -> str:
        """Wait until the container is lost; the reason."""

    @abstractmethod
    async def remove(self, name: str) -> None:
        """Return when there is no container of this name, nor anything of it."""

    @abstractmethod
    async def records(self) -> Records:
        """Every container with our label."""

    @abstractmethod
    async def dial(self, protocol: asyncio.Protocol, address: str) -> asyncio.Transport:
        """Part of Dials."""

    @abstractmethod
    async def hang_up(self) -> None:
        """Close the connections to the place."""

    async def silence(self, container: Container) -> str:
        """What may be wrong when no slot server answers in a container that runs."""
        return ""

    def own_image(self, spec: SandboxSpec) -> str | None:
        """The image of containers for this spec; directories, layouts and archives are for its slots."""
        return spec.image if spec.image and not is_for_slots(spec.image) else self._options.image

    def host_key(self, spec: SandboxSpec) -> str:
        """A server builds each slot for the spec of its lease; only the image belongs to the container."""
        return hashlib.sha256(str(self.own_image(spec)).encode()).hexdigest()[:12]

    def on_host_lost(self, callback: Callable[[str, str], None]) -> None:
        """Part of ReportsLoss."""
        self._tell_lost = callback

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        """Create and start the container, or find the one of this name."""
        try:
            container = await self.find(name)
        except self.unreachable as error:
            raise PlaceUnreachable(f"{name}: {said(error)}") from error
        try:
            if container is None:
                container = await self._create(name, await self.prepare(name, spec))
            host = await self.reach(name, container, spec)
        except self.unreachable as error:
            raise HostStartFailed(f"{name}: {said(error)}") from error
        watch = self._watch(name, container)
        loading = load_server(name, host.address, host.token, packed_server()[0], self.dial)
        try:
            async with asyncio.timeout(self._options.ready_timeout_s):
                await _unless_ended(watch, loading)
        except TimeoutError as error:
            raise HostStartFailed(
                f"{name}: its slot server did not answer in {self._options.ready_timeout_s:g} s"
                f"{await self.silence(container)}"
            ) from error
        return host

    async def stop(self, name: str) -> None:
        """Remove the container. Raises when that cannot be confirmed."""
        if watch := self._watches.pop(name, None):
            watch.cancel()
        try:
            if name in self._unanswered:
                await self._settle(name)
            async with asyncio.timeout(self._options.stop_timeout_s):
                await self.remove(name)
        except self.unreachable as error:
            raise SandboxError(f"{name} may be left at {self.place}: {said(error)}") from error

    async def list(self) -> Records:
        """Every container with our label, whoever started it."""
        try:
            return await self.records()
        except self.unreachable as error:
            raise SandboxError(f"what is at {self.place} cannot be listed: {said(error)}") from error

    async def close(self) -> None:
        """Stop watching and close the connections."""
        tasks = [*self._watches.values(), *self._pipes]
        self._watches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.hang_up()

    async def joined(self, protocol: asyncio.Protocol, stream: ByteStream) -> asyncio.Transport:
        """A transport whose bytes pass through the stream until either closes."""
        ours, theirs = socket.socketpair()
        pipe = asyncio.create_task(_join(stream, theirs))
        self._pipes.add(pipe)
        pipe.add_done_callback(self._pipes.discard)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, sock=ours)
        return transport

    async def _create(self, name: str, request: Request) -> Container:
        self._unanswered[name] = request
        try:
            container = await self.create(name, request)
        except self.unreachable as error:
            if self.refuses(error):
                del self._unanswered[name]
            raise
        del self._unanswered[name]
        return container

    async def _settle(self, name: str) -> None:
        """Repeat a create that got no answer: now the name is taken for certain, and can be removed."""
        try:
            await self._create(name, self._unanswered[name])
        except self.unreachable as error:
            if not self.is_taken(error) and not self.refuses(error):
                raise
            self._unanswered.pop(name, None)

    def _watch(self, name: str, container: Container) -> asyncio.Task[str]:
        watch = self._watches.get(name)
        if watch is None or watch.done():
            watch = self._watches[name] = asyncio.create_task(self.ended(name, container))
            watch.add_done_callback(lambda task: self._report(name, task))
        return watch

    def _report(self, name: str, task: asyncio.Task[str]) -> None:
        if not task.cancelled() and self._watches.get(name) is task:
            del self._watches[name]
            self._tell_lost(name, task.result())


class ByteStream(Protocol):
    """A stream of bytes that is not a socket."""

    async def send(self, data: bytes) -> None:
        """Write all of it."""

    def received(self) -> AsyncIterator[bytes]:
        """What arrives, until the other side ends."""

    async def close(self) -> None:
        """End it, with all that it needed."""


async def _join(stream: ByteStream, side: socket.socket) -> None:
    """Copy between the stream and our end of a socket pair until either closes."""
    reader, writer = await asyncio.open_connection(sock=side)

    async def upwards() -> None:
        while data := await reader.read(BLOCK):
            await stream.send(data)

    async def downwards() -> None:
        async for data in stream.received():
            writer.write(data)
            await writer.drain()

    copying = [asyncio.create_task(upwards()), asyncio.create_task(downwards())]
    try:
        await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in copying:
            task.cancel()
        await asyncio.gather(*copying, return_exceptions=True)
        writer.close()
        await stream.close()


async def _unless_ended(watch: asyncio.Task[str], work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        else:
            raise HostStartFailed(watch.result())
    finally:
        task.cancel()


def said(error: BaseException) -> str:
    """An error in its own words."""
    return str(getattr(error, "message", "") or error).strip() or type(error).__name__
