"""Hosts in Daytona sandboxes. One sandbox holds many slots.

    start   create a sandbox whose name is the host's, start relay and loader in it, send token and slot server
    watch   tell Daytona that the sandbox is in use, and notice when it is gone
    stop    delete the sandbox and wait until Daytona says that it is destroyed
    list    every sandbox with our label, with the owner from its labels

Slots are reached through the sandbox's preview address: a WebSocket whose payload is the byte stream. A sandbox that
nobody uses stops after `auto_stop_minutes` and is deleted when it stops, so a dead client costs nothing for long.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import shlex
import socket
import zlib
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

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
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from sandbox_pool.errors import HostStartFailed, PlaceUnreachable, SandboxError, SandboxLost
from sandbox_pool.images.image_source import is_for_slots
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext, checked_options
from sandbox_pool.providers.remote_start import load_server, loader_text, packed_server, token_hash
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
Records = list[HostRecord]


class DaytonaOptions(BaseModel):
    """`provider_options` of daytona."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    api_key: SecretStr | None = None
    """None: DAYTONA_API_KEY, which keeps it out of files."""
    api_url: str | None = None
    """None: DAYTONA_API_URL, else Daytona's own."""
    target: str | None = None
    """Region; None: DAYTONA_TARGET, else the organization's default."""
    snapshot: str | None = None
    """Snapshot of sandboxes; None: Daytona's default. It needs a Python 3.9 or later."""
    image: str | None = None
    """Image of sandboxes instead of a snapshot, unless a spec names its own."""
    user: str | None = None
    """Who the slot server runs as; None: as the snapshot says."""
    python: str = "python3"
    level: str | None = None
    """Build slots at this isolation level instead of the strongest that works in the sandbox."""
    cpu: int | None = Field(default=None, ge=1)
    memory_gb: int | None = Field(default=None, ge=1)
    disk_gb: int | None = Field(default=None, ge=1)
    """What one sandbox with all its slots gets; only with an image, a snapshot has sizes of its own."""
    auto_stop_minutes: int = Field(default=15, ge=1)
    """A sandbox that no pool uses is stopped after so long, and deleted."""
    lifetime_minutes: int = Field(default=0, ge=0)
    """A sandbox is destroyed after so long in any case, and drained before; 0: never."""
    create_timeout_s: float = Field(default=300.0, gt=0)
    ready_timeout_s: float = Field(default=60.0, gt=0)
    """How long a sandbox may take from its start until its slot server answers."""
    stop_timeout_s: float = Field(default=60.0, gt=0)


class DaytonaProvider:
    """Starts slot servers in Daytona sandboxes."""

    adopts = True

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        self._context = context
        self._options = checked_options(DaytonaOptions, options)
        self._client: AsyncDaytona | None = None
        self._tell_lost: Callable[[str, str], None] = lambda name, reason: None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._links: dict[str, tuple[str, str]] = {}
        """Sandbox -> its preview address and the token for it."""
        self._unanswered: dict[str, SandboxSpec] = {}
        """Sandboxes whose create got no answer."""
        self._pipes: set[asyncio.Task[None]] = set()

    def host_key(self, spec: SandboxSpec) -> str:
        """A server builds each slot for the spec of its lease; only the image belongs to the sandbox."""
        return hashlib.sha256(str(self._image(spec)).encode()).hexdigest()[:12]

    def on_host_lost(self, callback: Callable[[str, str], None]) -> None:
        """Part of ReportsLoss."""
        self._tell_lost = callback

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        """Create the sandbox, or find the one of this name."""
        try:
            box = await self._found(name)
        except UNREACHABLE as error:
            raise PlaceUnreachable(f"{name}: {_said(error)}") from error
        try:
            box = box or await self._create(name, spec)
            await box.process.exec(self._command(name, spec), timeout=int(self._options.ready_timeout_s))
            link = await box.get_preview_link(PORT)
        except UNREACHABLE as error:
            raise HostStartFailed(f"{name}: {_said(error)}") from error
        self._links[box.id] = link.url, link.token
        address, token = f"daytona:{box.id}", self._context.token(name)
        try:
            async with asyncio.timeout(self._options.ready_timeout_s):
                await load_server(name, address, token, packed_server()[0], self.dial)
        except TimeoutError as error:
            said = await self._log(box)
            raise HostStartFailed(
                f"{name}: its slot server did not answer in {self._options.ready_timeout_s:g} s{said}"
            ) from error
        self._watch(name, box)
        lifetime_s = self._options.lifetime_minutes * 60
        expires_at_s = _created_s(box) + lifetime_s if lifetime_s else None
        return Host(name, address, token, box.id, expires_at_s, drain_s=min(1800.0, lifetime_s / 4))

    async def stop(self, name: str) -> None:
        """Delete the sandbox. Raises when that cannot be confirmed."""
        if watch := self._watches.pop(name, None):
            watch.cancel()
        try:
            if name in self._unanswered:
                await self._settle(name)
            async with asyncio.timeout(self._options.stop_timeout_s):
                await self._delete(name)
        except UNREACHABLE as error:
            raise SandboxError(f"{name} may be left at Daytona: {_said(error)}") from error

    async def list(self) -> Records:
        """Every sandbox with our label, whoever started it."""
        query = ListSandboxesQuery(labels={LABEL: "host"})
        try:
            found = [box async for box in self._daytona().list(query)]
        except UNREACHABLE as error:
            raise SandboxError(f"the sandboxes of Daytona cannot be listed: {_said(error)}") from error
        return [
            HostRecord(box.name, box.labels.get(LABEL_OWNER, ""), _state(box), _created_s(box), box.id)
            for box in found
            if box.state != "destroyed"
        ]

    async def close(self) -> None:
        """Stop watching and close the connections to Daytona."""
        tasks = [*self._watches.values(), *self._pipes]
        self._watches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()  # type: ignore[no-untyped-call]
            self._client = None

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
                raise ConnectionError(f"no way into the sandbox: {_said(error)}") from error
            raise
        ours, theirs = socket.socketpair()
        pipe = asyncio.create_task(_join(stream, session, theirs))
        self._pipes.add(pipe)
        pipe.add_done_callback(self._pipes.discard)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, sock=ours)
        return transport

    def _daytona(self) -> AsyncDaytona:
        if self._client is None:
            options = self._options
            key = options.api_key.get_secret_value() if options.api_key else None
            try:
                self._client = AsyncDaytona(DaytonaConfig(api_key=key, api_url=options.api_url, target=options.target))
            except DaytonaAuthenticationError as error:
                raise PlaceUnreachable("Daytona needs a key: set DAYTONA_API_KEY") from error
        return self._client

    def _image(self, spec: SandboxSpec) -> str | None:
        """The image of sandboxes for this spec; directories, layouts and archives are for its slots."""
        return spec.image if spec.image and not is_for_slots(spec.image) else self._options.image

    async def _found(self, name: str) -> AsyncSandbox | None:
        try:
            box = await self._daytona().get(name)
        except DaytonaNotFoundError:
            return None
        if box.state in GONE:
            raise SandboxLost(f"{name}: its sandbox is {_text(box.state)}")
        return box

    async def _create(self, name: str, spec: SandboxSpec) -> AsyncSandbox:
        options = self._options
        common: dict[str, Any] = {
            "name": name,
            "labels": {LABEL: "host", LABEL_OWNER: self._context.owner},
            "os_user": options.user,
            "auto_stop_interval": options.auto_stop_minutes,
            "auto_delete_interval": 0,
            "ttl_minutes": options.lifetime_minutes or None,
        }
        params: CreateSandboxFromImageParams | CreateSandboxFromSnapshotParams
        if image := self._image(spec):
            sizes = Resources(cpu=options.cpu, memory=options.memory_gb, disk=options.disk_gb)
            params = CreateSandboxFromImageParams(image=image, resources=sizes, **common)
        else:
            params = CreateSandboxFromSnapshotParams(snapshot=options.snapshot, **common)
        self._unanswered[name] = spec
        try:
            box = await self._daytona().create(params, timeout=options.create_timeout_s)
        except REFUSED:
            del self._unanswered[name]
            raise
        del self._unanswered[name]
        return box

    async def _settle(self, name: str) -> None:
        """Repeat a create that got no answer: now the name is taken for certain, and can be deleted."""
        try:
            await self._create(name, self._unanswered[name])
        except DaytonaConflictError:
            del self._unanswered[name]

    async def _delete(self, name: str) -> None:
        try:
            box = await self._daytona().get(name)
            if box.state != "destroyed":
                await box.delete(timeout=self._options.stop_timeout_s, wait=True)
        except DaytonaNotFoundError:
            return
        self._links.pop(box.id, None)

    def _command(self, name: str, spec: SandboxSpec) -> str:
        """Starts relay and loader in the background; one that runs already stays the only one."""
        options, context = self._options, self._context
        # As whoever runs it: a folder of the temporary space that has no other owner.
        scratch = context.scratch_dir or Path("/tmp")
        variables = {
            "HRL_BIND": f"unix:{scratch}/hermes-rl-socket/s",
            "HRL_SCRATCH": scratch / "hermes-rl",
            "HRL_SERVER_SHA256": packed_server()[1],
            "HRL_TOKEN_SHA256": token_hash(context.token(name)),
            "HRL_LOAD_S": f"{options.ready_timeout_s:g}",
        }
        settings = " ".join(f"{key}={shlex.quote(str(value))}" for key, value in variables.items())
        arguments = context.server_arguments(name, options.level, self._image(spec))
        program = [options.python, "-c", _packed(RELAY.read_text()), str(PORT), _packed(loader_text()), *arguments]
        return f"{settings} nohup setsid {shlex.join(program)} </dev/null >/tmp/hermes-rl.log 2>&1 &"

    async def _log(self, box: AsyncSandbox) -> str:
        with contextlib.suppress(*UNREACHABLE):
            answer = await box.process.exec("tail -c 500 /tmp/hermes-rl.log", timeout=5)
            return f": {answer.result.strip()}" if answer.result.strip() else ""
        return ""

    def _watch(self, name: str, box: AsyncSandbox) -> None:
        watch = self._watches.get(name)
        if watch is None or watch.done():
            self._watches[name] = asyncio.create_task(self._keep(name, box))

    async def _keep(self, name: str, box: AsyncSandbox) -> None:
        """Daytona counts no bytes: what is in use says so, or it is stopped."""
        while True:
            await asyncio.sleep(self._options.auto_stop_minutes * 60 / REFRESHES)
            try:
                await box.refresh_activity()
                await box.refresh_data()
            except DaytonaNotFoundError:
                return self._tell_lost(name, f"{name}: its sandbox was deleted")
            except UNREACHABLE as error:
                log.warning("%s: Daytona does not answer: %s", name, _said(error))
                continue
            if box.state in GONE:
                return self._tell_lost(name, f"{name}: its sandbox is {_text(box.state)}")


async def _join(stream: aiohttp.ClientWebSocketResponse, session: aiohttp.ClientSession, side: socket.socket) -> None:
    """Copy between the WebSocket and our end of a socket pair until either closes."""
    reader, writer = await asyncio.open_connection(sock=side)

    async def upwards() -> None:
        while data := await reader.read(1 << 16):
            await stream.send_bytes(data)

    async def downwards() -> None:
        async for message in stream:
            writer.write(message.data)
            await writer.drain()

    copying = [asyncio.create_task(upwards()), asyncio.create_task(downwards())]
    try:
        await asyncio.wait(copying, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in copying:
            task.cancel()
        await asyncio.gather(*copying, return_exceptions=True)
        writer.close()
        with contextlib.suppress(*UNREACHABLE):
            await stream.close()
        await session.close()


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


def _said(error: BaseException) -> str:
    return str(error).strip() or type(error).__name__
