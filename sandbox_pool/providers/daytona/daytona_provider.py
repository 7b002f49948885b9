"""Hosts in Daytona sandboxes. One sandbox holds many slots.

Slots are reached through the sandbox's preview address: a WebSocket whose payload is the byte stream. A sandbox that
nobody uses stops after `auto_stop_minutes` and is deleted when it stops, so a dead client costs nothing for long.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import shlex
import zlib
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    DaytonaConfig,
    DaytonaError,
    DaytonaNotFoundError,
    ListSandboxesQuery,
    Resources,
)
from daytona.common.errors import (
    DaytonaAuthenticationError,
    DaytonaBadRequestError,
    DaytonaConflictError,
    DaytonaForbiddenError,
    DaytonaRateLimitError,
)
from pydantic import Field, SecretStr

from sandbox_pool.errors import PlaceUnreachable, SandboxLost
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext
from sandbox_pool.providers.containers_provider import ContainerOptions, ContainersProvider, Records, said
from sandbox_pool.providers.remote_start import loader_settings, loader_text
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

LABEL = "hermes-rl"
LABEL_OWNER = "hermes-rl-owner"
PORT = 8970
"""Of the relay: preview addresses lead to ports from 3000 to 9999."""
REFRESHES = 4
"""How often a sandbox in use says so, in the time after which Daytona would stop it."""
RELAY = Path(__file__).with_name("daytona_relay.py")
GONE = frozenset({"destroyed", "destroying", "stopped", "stopping", "archived", "archiving", "error", "build_failed"})
REFUSED = (
    DaytonaAuthenticationError,
    DaytonaBadRequestError,
    DaytonaForbiddenError,
    DaytonaNotFoundError,
    DaytonaRateLimitError,
)
"""Answers to a create after which nothing exists."""
UNREACHABLE = (DaytonaError, aiohttp.ClientError, OSError, TimeoutError)
Params = CreateSandboxFromImageParams | CreateSandboxFromSnapshotParams


class DaytonaOptions(ContainerOptions):
    """`provider_options` of daytona."""

    api_key: SecretStr | None = None
    """None: DAYTONA_API_KEY, which keeps it out of files."""
    api_url: str | None = None
    """None: DAYTONA_API_URL, else Daytona's own."""
    target: str | None = None
    """Region; None: DAYTONA_TARGET, else the organization's default."""
    snapshot: str | None = None
    """Snapshot of sandboxes where no `image` is named; None: Daytona's default. It needs a Python 3.9 or later."""
    user: str | None = None
    """Who the slot server runs as; None: as the snapshot says."""
    cpu: int | None = Field(default=None, ge=1)
    memory_gb: int | None = Field(default=None, ge=1)
    disk_gb: int | None = Field(default=None, ge=1)
    """What one sandbox with all its slots gets; only with an image, a snapshot has sizes of its own."""
    auto_stop_minutes: int = Field(default=15, ge=1)
    """A sandbox that no pool uses is stopped after so long, and deleted."""
    lifetime_minutes: int = Field(default=0, ge=0)
    """A sandbox is destroyed after so long in any case, and drained before; 0: never."""
    create_timeout_s: float = Field(default=300.0, gt=0)


class DaytonaProvider(ContainersProvider[DaytonaOptions, Params, AsyncSandbox]):
    """Starts slot servers in Daytona sandboxes."""

    place: ClassVar = "Daytona"
    options_model = DaytonaOptions
    unreachable = UNREACHABLE

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._client: AsyncDaytona | None = None
        self._links: dict[str, tuple[str, str]] = {}
        """Sandbox -> its preview address and the token for it."""

    async def find(self, name: str) -> AsyncSandbox | None:
        """By the name, which is the host's."""
        try:
            box = await self._daytona().get(name)
        except DaytonaNotFoundError:
            return None
        if box.state in GONE:
            raise SandboxLost(f"{name}: its sandbox is {_text(box.state)}")
        return box

    async def prepare(self, name: str, spec: SandboxSpec) -> Params:
        """A sandbox of the image, or of the snapshot."""
        options = self._options
        common: dict[str, Any] = {
            "name": name,
            "labels": {LABEL: "host", LABEL_OWNER: self._context.owner},
            "os_user": options.user,
            "auto_stop_interval": options.auto_stop_minutes,
            "auto_delete_interval": 0,
            "ttl_minutes": options.lifetime_minutes or None,
        }
        if image := self.own_image(spec):
            sizes = Resources(cpu=options.cpu, memory=options.memory_gb, disk=options.disk_gb)
            return CreateSandboxFromImageParams(image=image, resources=sizes, **common)
        return CreateSandboxFromSnapshotParams(snapshot=options.snapshot, **common)

    async def create(self, name: str, request: Params) -> AsyncSandbox:
        """A sandbox that has started."""
        return await self._daytona().create(request, timeout=self._options.create_timeout_s)

    def refuses(self, error: BaseException) -> bool:
        """Daytona says what is wrong with the request."""
        return isinstance(error, REFUSED)

    def is_taken(self, error: BaseException) -> bool:
        """Daytona says so."""
        return isinstance(error, DaytonaConflictError)

    async def reach(self, name: str, container: AsyncSandbox, spec: SandboxSpec) -> Host:
        """Through the preview address of the relay's port."""
        options = self._options
        await container.process.exec(self._command(name, spec), timeout=int(options.ready_timeout_s))
        link = await container.get_preview_link(PORT)
        self._links[container.id] = link.url, link.token
        lifetime_s = options.lifetime_minutes * 60
        expires_at_s = _created_s(container) + lifetime_s if lifetime_s else None
        address, token = f"daytona:{container.id}", self._context.token(name)
        return Host(name, address, token, container.id, expires_at_s, drain_s=min(1800.0, lifetime_s / 4))

    async def silence(self, container: AsyncSandbox) -> str:
        """The end of what relay and loader wrote."""
        with contextlib.suppress(*UNREACHABLE):
            answer = await container.process.exec("tail -c 500 /tmp/hermes-rl.log", timeout=5)
            return f": {answer.result.strip()}" if answer.result.strip() else ""
        return ""

    async def ended(self, name: str, container: AsyncSandbox) -> str:
        """Daytona counts no bytes: what is in use says so, or it is stopped."""
        while True:
            await asyncio.sleep(self._options.auto_stop_minutes * 60 / REFRESHES)
            try:
                await container.refresh_activity()
                await container.refresh_data()
            except DaytonaNotFoundError:
                return f"{name}: its sandbox was deleted"
            except UNREACHABLE as error:
                log.warning("%s: Daytona does not answer: %s", name, said(error))
                continue
            if container.state in GONE:
                return f"{name}: its sandbox is {_text(container.state)}"

    async def remove(self, name: str) -> None:
        """Delete it, and wait until Daytona says that it is destroyed."""
        try:
            box = await self._daytona().get(name)
            if box.state != "destroyed":
                await box.delete(timeout=self._options.stop_timeout_s, wait=True)
        except DaytonaNotFoundError:
            return
        self._links.pop(box.id, None)

    async def records(self) -> Records:
        """With the owner from the labels."""
        found = [box async for box in self._daytona().list(ListSandboxesQuery(labels={LABEL: "host"}))]
        return [
            HostRecord(box.name, box.labels.get(LABEL_OWNER, ""), _state(box), _created_s(box), box.id)
            for box in found
            if box.state != "destroyed"
        ]

    async def dial(self, protocol: asyncio.Protocol, address: str) -> asyncio.Transport:
        """Part of Dials: a WebSocket through the preview address."""
        url, token = self._links[address.removeprefix("daytona:")]
        session = aiohttp.ClientSession()
        try:
            stream = await session.ws_connect(
                url, headers={"X-Daytona-Preview-Token": token}, max_msg_size=0, compress=0, autoping=True
            )
        except BaseException as error:
            await session.close()
            if isinstance(error, aiohttp.ClientError):
                raise ConnectionError(f"no way into the sandbox: {said(error)}") from error
            raise
        return await self.joined(protocol, PreviewStream(session, stream))

    async def hang_up(self) -> None:
        """Close the client."""
        if self._client is not None:
            await self._client.close()  # type: ignore[no-untyped-call]
            self._client = None

    def _daytona(self) -> AsyncDaytona:
        if self._client is None:
            options = self._options
            key = options.api_key.get_secret_value() if options.api_key else None
            try:
                self._client = AsyncDaytona(DaytonaConfig(api_key=key, api_url=options.api_url, target=options.target))
            except DaytonaAuthenticationError as error:
                raise PlaceUnreachable("Daytona needs a key: set DAYTONA_API_KEY") from error
        return self._client

    def _command(self, name: str, spec: SandboxSpec) -> str:
        """Starts relay and loader in the background; one that runs already stays the only one."""
        options, context = self._options, self._context
        # As whoever runs it: a folder of the temporary space that has no other owner.
        scratch = context.scratch_dir or Path("/tmp")
        bind = f"unix:{scratch}/hermes-rl-socket/s"
        variables = loader_settings(context, name, bind, scratch, options.ready_timeout_s)
        settings = " ".join(f"{key}={shlex.quote(value)}" for key, value in variables.items())
        arguments = context.server_arguments(name, options.level, self.own_image(spec))
        program = [options.python, "-c", _packed(RELAY.read_text()), str(PORT), _packed(loader_text()), *arguments]
        return f"{settings} nohup setsid {shlex.join(program)} </dev/null >/tmp/hermes-rl.log 2>&1 &"


class PreviewStream:
    """A WebSocket whose payload is the byte stream, and the session that it belongs to."""

    def __init__(self, session: aiohttp.ClientSession, stream: aiohttp.ClientWebSocketResponse) -> None:
        self._session = session
        self._stream = stream

    async def send(self, data: bytes) -> None:
        """As one message."""
        await self._stream.send_bytes(data)

    async def received(self) -> AsyncIterator[bytes]:
        """Messages, whatever their size."""
        async for message in self._stream:
            yield message.data

    async def close(self) -> None:
        """End the WebSocket."""
        with contextlib.suppress(*UNREACHABLE):
            await self._stream.close()
        await self._session.close()


def _packed(program: str) -> str:
    """A program as one line without quotes inside, whatever shell takes it."""
    packed = base64.b64encode(zlib.compress(program.encode())).decode()
    return f'import base64,zlib;exec(zlib.decompress(base64.b64decode(b"{packed}")))'


def _state(box: AsyncSandbox) -> str:
    return "running" if box.state == "started" else "dead" if box.state in GONE else "starting"


def _text(state: Any) -> str:
    return str(getattr(state, "value", state))


def _created_s(box: AsyncSandbox) -> float:
    return datetime.fromisoformat(box.created_at).timestamp() if box.created_at else 0.0
