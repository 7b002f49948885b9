"""Hosts in containers of a Docker or Podman engine, over the API that both speak. One container holds many slots.

    start   create a container whose name is the host's, start it, send token and slot server to its loader
    watch   one waiting call per container; when it returns, the host is lost, with the exit code as the reason
    stop    remove the container by force with its volume; the engine answers when both are gone
    list    every container with our label, running or not, with the owner from its labels

Slots are reached in one of two ways (`data_path`). `socket`: a folder of this machine is mounted into the container and
holds the slot server's socket, as fast as local slots. `exec`: an exec of the engine joins its stream with that socket,
so whoever reaches the engine (over ssh, over TLS, from a Mac) reaches the slots, whatever network the container has.

aiodocker does the talking: it is maintained, asynchronous, built on the aiohttp we have, and knows contexts, TLS and
ssh. docker-py blocks; podman's own client knows only podman.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Literal

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError
from aiodocker.stream import Stream
from pydantic import BaseModel, ConfigDict, Field, field_validator

from sandbox_pool.client.connection import dial as dial_address
from sandbox_pool.errors import HostStartFailed, PlaceUnreachable, SandboxError, SandboxLost
from sandbox_pool.images.image_source import is_for_slots
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext, Texts, checked_options
from sandbox_pool.providers.remote_start import load_server, loader_text, packed_server, token_hash
from sandbox_pool.server.host_files import open_private, remove_tree
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

LABEL_HOST = "hermes-rl.host"
LABEL_OWNER = "hermes-rl.owner"
IMAGE = "hermes-sandbox"
"""What `hermes-rl pool image build` makes."""
SCRATCH = Path("/scratch")
INSIDE = "/run/hermes-rl"
"""Where the slot server's socket is in a container."""
INITS = ("/sbin/docker-init", "/run/podman-init")
"""What engines put into the root for `Init`."""
SOCKETS = Path("/tmp")
"""Short: Linux allows 107 bytes for the path of a socket."""
SCHEMES = ("unix://", "tcp://", "http://", "https://", "ssh://", "npipe://")
EXEC = "exec:"
RELAY_CONNECT_S = 3.0
POLL_S = 0.1
LOG_LINES = 20
Records = list[HostRecord]
Json = dict[str, Any]
UNREACHABLE = (DockerError, aiohttp.ClientError, OSError, TimeoutError)


class DockerOptions(BaseModel):
    """`provider_options` of the docker and podman providers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str | None = None
    """The engine: `unix:///path`, `tcp://host:2376`, `ssh://user@host`. None: DOCKER_HOST (podman: CONTAINER_HOST), the
    current context, then the usual sockets, this user's own first. TLS as for the docker command: DOCKER_TLS_VERIFY=1
    and DOCKER_CERT_PATH."""
    context: str | None = None
    """Name of a docker context."""
    image: str = IMAGE
    """Image of containers unless a spec names its own. It needs a Python 3.9 or later."""
    pull: Literal["missing", "always", "never"] = "missing"
    python: str = "python3"
    level: str | None = None
    """Build slots at this isolation level instead of the strongest that works in the container."""

    cpu: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, ge=64)
    """What one container with all its slots may use; None: no limit."""
    shm_mb: int = Field(default=1024, ge=1)
    gpus: str | None = None
    """`all`, a number, or ids such as `0,2` (podman: devices of CDI)."""
    runtime: str | None = None
    """OCI runtime known to the engine, e.g. `runsc` or `kata`; None: its default."""
    cap_add: Texts = ()
    """`SYS_ADMIN` gives slots namespaces of their own; without it they have landlock."""
    security_opt: Texts = ()
    mounts: Texts = ()
    """`SOURCE:TARGET[:ro]` of the engine's machine, for the container; `spec.mounts` passes them on to slots."""
    network: str | None = None
    """`none`, `host`, or a network of the engine; None: its default. Slots have what their spec says, up to this."""
    labels: Texts = ()
    """More labels of the containers, as `key=value`."""
    data_path: Literal["socket", "exec", "auto"] = "auto"
    """How slots are reached; `auto`: by a shared socket where the engine is this machine's own, else by exec."""

    pull_timeout_s: float = Field(default=1800.0, gt=0)
    ready_timeout_s: float = Field(default=60.0, gt=0)
    """How long a container may take from its start until its slot server answers."""
    stop_timeout_s: float = Field(default=60.0, gt=0)
    api_timeout_s: float = Field(default=60.0, gt=0)

    @field_validator("host")
    @classmethod
    def _has_scheme(cls, host: str | None) -> str | None:
        if host and not host.startswith(SCHEMES):
            raise ValueError(f"an engine is named as one of {', '.join(SCHEMES)}")
        return host

    @field_validator("labels")
    @classmethod
    def _are_pairs(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        for each in labels:
            if "=" not in each or each.startswith("hermes-rl."):
                raise ValueError(f"a label is key=value and does not begin with hermes-rl., not {each!r}")
        return labels

    @field_validator("mounts")
    @classmethod
    def _have_targets(cls, mounts: tuple[str, ...]) -> tuple[str, ...]:
        for each in mounts:
            parts = each.split(":")
            if len(parts) not in (2, 3) or not parts[1].startswith("/"):
                raise ValueError(f"a mount is SOURCE:TARGET or SOURCE:TARGET:ro, not {each!r}")
        return mounts

    def host_config(self) -> Json:
        """The part of a create request that says what the container may use."""
        return {
            "NanoCpus": int(self.cpu * 1e9) if self.cpu else 0,
            "Memory": self.memory_mb << 20 if self.memory_mb else 0,
            "ShmSize": self.shm_mb << 20,
            "CapAdd": list(self.cap_add),
            "SecurityOpt": list(self.security_opt),
            # Zombies of commands that outlive their shell are reaped.
            "Init": True,
            **({"NetworkMode": self.network} if self.network else {}),
            **({"Runtime": self.runtime} if self.runtime else {}),
        }


class DockerProvider:
    """Starts slot servers in containers of a Docker engine."""

    adopts = True
    kind: ClassVar = "docker"

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        self._context = context
        self._options = checked_options(DockerOptions, options)
        self._client: aiodocker.Docker | None = None
        self._shared: bool | None = None
        self._tell_lost: Callable[[str, str], None] = lambda name, reason: None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._unanswered: dict[str, Json] = {}
        """Containers whose create got no answer -> what was asked for."""
        self._pipes: set[asyncio.Task[None]] = set()

    def host_key(self, spec: SandboxSpec) -> str:
        """A server builds each slot for the spec of its lease; only the image belongs to the container."""
        return hashlib.sha256(self._image(spec).encode()).hexdigest()[:12]

    def on_host_lost(self, callback: Callable[[str, str], None]) -> None:
        """Part of ReportsLoss."""
        self._tell_lost = callback

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        """Create and start the container, or find the one of this name."""
        try:
            shared = await self._shares_sockets()
            found = await self._found(name)
        except UNREACHABLE as error:
            raise PlaceUnreachable(f"{name}: {_said(error)}") from error
        try:
            container = found or await self._create(name, spec, shared)
            await container.start()
            facts = await container.show()
        except UNREACHABLE as error:
            raise HostStartFailed(f"{name}: {_said(error)}") from error
        self._require_runtime(name, facts)
        address = f"unix:{_socket_folder(name)}/s" if shared else f"{EXEC}{container.id}"
        token = self._context.token(name)
        watch = self._watch(name, container)
        loading = load_server(name, address, token, packed_server()[0], self.dial)
        try:
            async with asyncio.timeout(self._options.ready_timeout_s):
                await self._unless_ended(watch, loading)
        except TimeoutError as error:
            hint = "; is it on another machine? `data_path: exec` needs no shared folder" if shared else ""
            raise HostStartFailed(
                f"{name}: its slot server did not answer in {self._options.ready_timeout_s:g} s{hint}"
            ) from error
        return Host(name, address, token, identity=container.id)

    async def stop(self, name: str) -> None:
        """Remove the container and its volume. Raises when that cannot be confirmed."""
        if watch := self._watches.pop(name, None):
            watch.cancel()
        try:
            if name in self._unanswered:
                await self._settle(name)
            async with asyncio.timeout(self._options.stop_timeout_s):
                await self._remove(name)
        except UNREACHABLE as error:
            raise SandboxError(f"{name} may be left at the engine: {_said(error)}") from error
        if problems := await asyncio.to_thread(_remove_socket_folder, name):
            raise SandboxError(f"{name}: {'; '.join(problems)}")

    async def list(self) -> Records:
        """Every container with our label, whoever started it."""
        labelled = json.dumps({"label": [LABEL_HOST]})
        try:
            found = await self._engine().containers.list(all="true", filters=labelled)
        except UNREACHABLE as error:
            raise SandboxError(f"the containers of {self.kind} cannot be listed: {_said(error)}") from error
        return [_record(each) for each in found]

    async def close(self) -> None:
        """Stop watching and close the connections to the engine."""
        tasks = [*self._watches.values(), *self._pipes]
        self._watches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def dial(self, protocol: asyncio.Protocol, address: str) -> asyncio.Transport:
        """Part of Dials: the shared socket, or an exec of the relay."""
        if not address.startswith(EXEC):
            return await dial_address(protocol, address)
        # A client of its own: the session of the other belongs to the pool's loop, and this may be another.
        engine = self._new_engine()
        try:
            stream = await self._relay(engine, address.removeprefix(EXEC))
        except BaseException as error:
            await engine.close()
            if isinstance(error, DockerError | aiohttp.ClientError):
                raise ConnectionError(f"no exec in the container: {_said(error)}") from error
            raise
        ours, theirs = socket.socketpair()
        pipe = asyncio.create_task(_join(stream, engine, theirs))
        self._pipes.add(pipe)
        pipe.add_done_callback(self._pipes.discard)
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, sock=ours)
        return transport

    async def _relay(self, engine: aiodocker.Docker, container_id: str) -> Stream:
        relay = Path(__file__).with_name("docker_relay.py").read_text()
        command = [self._options.python, "-I", "-S", "-c", relay, f"{INSIDE}/s", str(RELAY_CONNECT_S)]
        # As root, like the loader, whatever user the image names: the socket is root's alone.
        running = await engine.containers.container(container_id).exec(command, stdin=True, user="0")
        return await running.start().__aenter__()

    def _image(self, spec: SandboxSpec) -> str:
        """The image of containers for this spec; directories, layouts and archives are for its slots."""
        return spec.image if spec.image and not is_for_slots(spec.image) else self._options.image

    def _engine(self) -> aiodocker.Docker:
        if self._client is None:
            self._client = self._new_engine()
        return self._client

    def _new_engine(self) -> aiodocker.Docker:
        return open_engine(self.kind, self._options)

    async def _shares_sockets(self) -> bool:
        """Whether a socket that root of a container makes in a folder of ours can be opened by us."""
        if self._shared is None:
            path = self._options.data_path
            self._shared = path == "socket" if path != "auto" else await self._is_here()
        return self._shared

    async def _is_here(self) -> bool:
        engine = self._engine()
        # A subclass of it leads to another machine, over ssh.
        if sys.platform != "linux" or type(engine.connector) is not aiohttp.UnixConnector:
            return False
        security = " ".join((await engine.system.info()).get("SecurityOptions") or ())
        if "name=userns" in security:
            return False
        return os.geteuid() == 0 or "name=rootless" in security

    async def _found(self, name: str) -> DockerContainer | None:
        try:
            container = await self._engine().containers.get(name)
        except DockerError as error:
            if error.status == 404:
                return None
            raise
        if container["State"]["Status"] not in ("created", "running"):
            raise SandboxLost(f"{name}: its container is {container['State']['Status']}")
        return container

    async def _create(self, name: str, spec: SandboxSpec, shared: bool) -> DockerContainer:
        image = self._image(spec)
        await self._pull(image)
        settings = _image_config((await self._engine().images.inspect(image)).get("Config") or {})
        config = await asyncio.to_thread(self._config, name, image, settings, shared)
        self._unanswered[name] = config
        try:
            container = await self._engine().containers.create(config, name=name)
        except DockerError as error:
            if error.status in (400, 404):
                del self._unanswered[name]  # refused: nothing can exist
            raise
        del self._unanswered[name]
        return container

    async def _settle(self, name: str) -> None:
        """Repeat a create that got no answer: now the name is taken for certain, and can be removed."""
        try:
            await self._engine().containers.create(self._unanswered[name], name=name)
        except DockerError as error:
            if error.status == 900:
                raise
        del self._unanswered[name]

    async def _pull(self, image: str) -> None:
        policy, images = self._options.pull, self._engine().images
        if policy == "missing":
            try:
                await images.inspect(image)
            except DockerError as error:
                if error.status != 404:
                    raise
            else:
                return
        if policy != "never":
            try:
                await images.pull(image, timeout=self._options.pull_timeout_s)
            except DockerError as error:
                hint = "; `hermes-rl pool image build` makes it" if image == IMAGE else ""
                raise HostStartFailed(f"the image {image!r} cannot be pulled: {_said(error)}{hint}") from error

    def _config(self, name: str, image: str, settings: Json, shared: bool) -> Json:
        """The body of the create request."""
        options, context = self._options, self._context
        scratch = context.scratch_dir or SCRATCH
        variables = {
            "HRL_BIND": f"unix:{INSIDE}/s",
            "HRL_SCRATCH": scratch / "hermes-rl",
            "HRL_SERVER_SHA256": packed_server()[1],
            "HRL_TOKEN_SHA256": token_hash(context.token(name)),
            "HRL_LOAD_S": f"{options.ready_timeout_s:g}",
        }
        mine = [f"{_make_socket_folder(name)}:{INSIDE}"] if shared else []
        server = [*context.server_arguments(name, options.level, image), "--image-config", json.dumps(settings)]
        ours = [INSIDE, *INITS, *([] if context.scratch_dir else [str(SCRATCH)])]
        server += [word for path in ours for word in ("--keep-out", path)]
        return {
            "Image": image,
            "User": "0",
            "Entrypoint": [options.python],
            "Cmd": ["-c", loader_text(), *server],
            "Env": [f"{key}={value}" for key, value in variables.items()],
            "WorkingDir": "/",
            "Labels": {
                **dict(each.split("=", 1) for each in options.labels),
                LABEL_HOST: name,
                LABEL_OWNER: context.owner,
            },
            # Layers of slots cannot lie on a container's own root: that is an overlay itself.
            "Volumes": {str(scratch): {}},
            "HostConfig": {**options.host_config(), "Binds": [*mine, *options.mounts], **self._gpus()},
        }

    def _gpus(self) -> Json:
        if not (gpus := self._options.gpus):
            return {}
        if gpus == "all" or gpus.isdecimal():
            chosen: Json = {"Count": -1 if gpus == "all" else int(gpus)}
        else:
            chosen = {"DeviceIDs": gpus.split(",")}
        return {"DeviceRequests": [{**chosen, "Capabilities": [["gpu"]]}]}

    def _require_runtime(self, name: str, facts: Json) -> None:
        """An engine that does not know this part of the API would run slots with less isolation, silently."""
        wanted = self._options.runtime
        used = facts.get("OCIRuntime") or facts["HostConfig"].get("Runtime")
        if wanted and wanted != used:
            raise HostStartFailed(f"{name}: the engine runs it with {used!r}, not with the runtime {wanted!r}")

    def _watch(self, name: str, container: DockerContainer) -> asyncio.Task[None]:
        watch = self._watches.get(name)
        if watch is None or watch.done():
            watch = self._watches[name] = asyncio.create_task(self._ended(name, container))
            watch.add_done_callback(lambda task: self._report(name, task))
        return watch

    async def _ended(self, name: str, container: DockerContainer) -> None:
        """Wait for the container's end; raises SandboxLost with the reason."""
        while True:
            try:
                code = (await container.wait(timeout=None)).get("StatusCode")
                break
            except DockerError as error:
                if error.status == 404:
                    raise SandboxLost(f"{name}: its container was removed") from None
                await asyncio.sleep(1)  # the engine restarts; containers may outlive it
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(1)
        said = ""
        with contextlib.suppress(*UNREACHABLE):
            killed = (await container.show())["State"].get("OOMKilled")
            lines = await container.log(stdout=True, stderr=True, tail=LOG_LINES)
            said = " (out of memory)" if killed else f": {''.join(lines).strip()[-1000:]}"
        raise SandboxLost(f"{name}: its container ended with {code}{said}")

    def _report(self, name: str, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and self._watches.get(name) is task:
            del self._watches[name]
            self._tell_lost(name, str(task.exception()))

    @staticmethod
    async def _unless_ended(watch: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            else:
                raise HostStartFailed(str(watch.exception()))
        finally:
            task.cancel()

    async def _remove(self, name: str) -> None:
        while True:
            try:
                await self._engine().containers.container(name).delete(force=True, v=True)
            except DockerError as error:
                if error.status == 404:
                    return
                if error.status != 409:
                    raise
                await asyncio.sleep(POLL_S)  # somebody else is removing it


class PodmanProvider(DockerProvider):
    """The same in containers of podman, rootful or rootless, over the socket of `podman system service`."""

    kind = "podman"

    def _gpus(self) -> Json:
        gpus = self._options.gpus
        devices = [f"nvidia.com/gpu={each}" for each in gpus.split(",")] if gpus else []
        return {"Devices": [{"PathOnHost": each} for each in devices]} if devices else {}


def open_engine(kind: str, options: DockerOptions) -> aiodocker.Docker:
    """A client of the engine; needs a running loop. `PlaceUnreachable` when nothing says where it is."""
    variable = "CONTAINER_HOST" if kind == "podman" else "DOCKER_HOST"
    own = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    timeout = aiohttp.ClientTimeout(total=options.api_timeout_s)
    url = options.host or (None if options.context else os.environ.get(variable))
    place = f"{own}/docker.sock"
    if kind == "podman":
        place = f"{own}/podman/podman.sock" if os.getuid() else "/run/podman/podman.sock"
        url = url or (f"unix://{place}" if Path(place).is_socket() else None)
    try:
        if url or kind == "docker":
            with contextlib.suppress(AssertionError):  # it finds no engine
                return aiodocker.Docker(url, context=options.context, timeout=timeout)
            if Path(place).is_socket():
                return aiodocker.Docker(f"unix://{place}", timeout=timeout)
    except (DockerError, ValueError, OSError) as error:
        raise PlaceUnreachable(f"the engine {url or options.context or ''} cannot be used: {_said(error)}") from error
    start = "systemctl --user start podman.socket" if kind == "podman" else "start dockerd"
    raise PlaceUnreachable(f"no {kind} engine listens at {place} or its other usual places: {start}, or set {variable}")


async def _join(stream: Stream, engine: aiodocker.Docker, side: socket.socket) -> None:
    """Copy between the exec's stream and our end of a socket pair until either closes."""
    reader, writer = await asyncio.open_connection(sock=side)

    async def upwards() -> None:
        while data := await reader.read(1 << 16):
            await stream.write_in(data)

    async def downwards() -> None:
        while (message := await stream.read_out()) is not None:
            if message.stream == 1:
                writer.write(message.data)
                await writer.drain()
            else:
                log.debug("the relay says: %s", message.data.decode(errors="replace").strip())

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
        await engine.close()


def _image_config(config: Json) -> Json:
    """What slots of an image take from its configuration."""
    env = dict(each.partition("=")[::2] for each in config.get("Env") or ())
    return {"env": env, "workdir": config.get("WorkingDir") or "", "user": config.get("User") or ""}


def _record(container: DockerContainer) -> HostRecord:
    labels, status = container["Labels"], container["State"]
    state = {"created": "starting", "running": "running", "paused": "running"}.get(status, "dead")
    created = container["Created"]
    created_s = created if isinstance(created, int) else datetime.fromisoformat(created).timestamp()
    return HostRecord(labels[LABEL_HOST], labels.get(LABEL_OWNER, ""), state, float(created_s), container.id[:12])


def _said(error: BaseException) -> str:
    if isinstance(error, DockerError):
        return str(error.message)
    return str(error) or type(error).__name__


def _socket_folder(name: str) -> Path:
    return SOCKETS / f"hermes-rl-docker-{os.getuid()}" / name


def _make_socket_folder(name: str) -> Path:
    folder = _socket_folder(name)
    os.close(open_private(folder.parent, 0o700))
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _remove_socket_folder(name: str) -> list[str]:
    folder = _socket_folder(name)
    problems = remove_tree(folder) if folder.exists() else []
    with contextlib.suppress(OSError):  # others are in it
        folder.parent.rmdir()
    return problems
