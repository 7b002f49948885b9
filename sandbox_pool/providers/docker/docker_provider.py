"""Hosts in containers of a Docker or Podman engine, over the API that both speak. One container holds many slots.

Slots are reached in one of two ways (`data_path`). `socket`: a folder of this machine is mounted into the container and
holds the slot server's socket, as fast as local slots. `exec`: an exec of the engine joins its stream with that socket,
so whoever reaches the engine (over ssh, over TLS, from a Mac) reaches the slots, whatever network the container has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import aiodocker
import aiohttp
from aiodocker.containers import DockerContainer
from aiodocker.exceptions import DockerError
from aiodocker.stream import Stream

from sandbox_pool.client.connection import dial as dial_address
from sandbox_pool.errors import HostStartFailed, SandboxError, SandboxLost
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext
from sandbox_pool.providers.containers_provider import ContainersProvider, Records, said
from sandbox_pool.providers.docker.docker_engine import (
    IMAGE,
    UNREACHABLE,
    DockerOptions,
    Json,
    open_engine,
    settled_engine,
)
from sandbox_pool.providers.remote_start import loader_settings, loader_text
from sandbox_pool.server.host_files import open_private, remove_tree
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

LABEL_HOST = "hermes-rl.host"
LABEL_OWNER = "hermes-rl.owner"
SCRATCH = Path("/scratch")
INSIDE = "/run/hermes-rl"
"""Where the slot server's socket is in a container."""
INITS = ("/sbin/docker-init", "/run/podman-init")
"""What engines put into the root for `Init`."""
SOCKETS = Path("/tmp")
"""Short: Linux allows 107 bytes for the path of a socket."""
EXEC = "exec:"
RELAY = Path(__file__).with_name("docker_relay.py")
RELAY_CONNECT_S = 3.0
POLL_S = 0.1
LOG_LINES = 20


class DockerProvider(ContainersProvider[DockerOptions, Json, DockerContainer]):
    """Starts slot servers in containers of a Docker engine."""

    kind: ClassVar = "docker"
    place: ClassVar = "the engine"
    options_model = DockerOptions
    unreachable = UNREACHABLE

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        super().__init__(context, options)
        self._client: aiodocker.Docker | None = None
        self._shared: bool | None = None

    def settled(self) -> Mapping[str, Any]:
        """Which engine the environment names."""
        with contextlib.suppress(DockerError):  # a context that is not there: the first start says so
            return {name: str(value) for name, value in settled_engine(self.kind, self._options).items()}
        return {}

    async def find(self, name: str) -> DockerContainer | None:
        """By the name, which is the host's."""
        try:
            container = await self._engine().containers.get(name)
        except DockerError as error:
            if error.status == 404:
                return None
            raise
        if container["State"]["Status"] not in ("created", "running"):
            raise SandboxLost(f"{name}: its container is {container['State']['Status']}")
        return container

    async def prepare(self, name: str, spec: SandboxSpec) -> Json:
        """The body of the create request; the engine has the image."""
        image = self.own_image(spec) or IMAGE
        await self._pull(image)
        settings = _image_config((await self._engine().images.inspect(image)).get("Config") or {})
        return await asyncio.to_thread(self._config, name, image, settings, await self._shares_sockets())

    async def create(self, name: str, request: Json) -> DockerContainer:
        """A container that does not run yet."""
        return await self._engine().containers.create(request, name=name)

    def refuses(self, error: BaseException) -> bool:
        """The image or an option is not to be had."""
        return isinstance(error, DockerError) and error.status in (400, 404)

    def is_taken(self, error: BaseException) -> bool:
        """900: no answer. All others were given after a look at the name."""
        return isinstance(error, DockerError) and error.status != 900

    async def reach(self, name: str, container: DockerContainer, spec: SandboxSpec) -> Host:
        """Its socket is in a folder of this machine, or behind an exec."""
        await container.start()
        self._require_runtime(name, await container.show())
        address = f"unix:{_socket_folder(name)}/s" if await self._shares_sockets() else f"{EXEC}{container.id}"
        return Host(name, address, self._context.token(name), identity=container.id)

    async def silence(self, container: DockerContainer) -> str:
        """A folder of another machine is not the one the socket is in."""
        shared = await self._shares_sockets()
        return "; is it on another machine? `data_path: exec` needs no shared folder" if shared else ""

    async def ended(self, name: str, container: DockerContainer) -> str:
        """One call that waits for the container's end, on a client of its own: one client has few connections."""
        async with open_engine(self.kind, self._options) as engine:
            watched = engine.containers.container(container.id)
            while True:
                try:
                    code = (await watched.wait(timeout=None)).get("StatusCode")
                    break
                except DockerError as error:
                    if error.status == 404:
                        return f"{name}: its container was removed"
                    await asyncio.sleep(1)  # the engine restarts; containers may outlive it
                except (aiohttp.ClientError, OSError):
                    await asyncio.sleep(1)
            last = ""
            with contextlib.suppress(*UNREACHABLE):
                killed = (await watched.show())["State"].get("OOMKilled")
                lines = await watched.log(stdout=True, stderr=True, tail=LOG_LINES)
                last = " (out of memory)" if killed else f": {''.join(lines).strip()[-1000:]}"
            return f"{name}: its container ended with {code}{last}"

    async def remove(self, name: str) -> None:
        """By force and with its volume: the engine answers when both are gone. Then the folder of its socket."""
        while True:
            try:
                await self._engine().containers.container(name).delete(force=True, v=True)
            except DockerError as error:
                if error.status == 404:
                    break
                if error.status != 409:
                    raise
                await asyncio.sleep(POLL_S)  # somebody else is removing it
        if problems := await asyncio.to_thread(_remove_socket_folder, name):
            raise SandboxError(f"{name}: {'; '.join(problems)}")

    async def records(self) -> Records:
        """Running or not, with the owner from the labels."""
        labelled = json.dumps({"label": [LABEL_HOST]})
        return [_record(each) for each in await self._engine().containers.list(all="true", filters=labelled)]

    async def dial(self, protocol: asyncio.Protocol, address: str) -> asyncio.Transport:
        """Part of Dials: the shared socket, or an exec of the relay."""
        if not address.startswith(EXEC):
            return await dial_address(protocol, address)
        # A client of its own: the session of the other belongs to the pool's loop, and this may be another.
        engine = open_engine(self.kind, self._options)
        command = [self._options.python, "-I", "-S", "-c", RELAY.read_text(), f"{INSIDE}/s", str(RELAY_CONNECT_S)]
        try:
            # As root, like the loader, whatever user the image names: the socket is root's alone.
            container = engine.containers.container(address.removeprefix(EXEC))
            running = await container.exec(command, stdin=True, user="0")
            stream = await running.start().__aenter__()
        except BaseException as error:
            await engine.close()
            if isinstance(error, DockerError | aiohttp.ClientError):
                raise ConnectionError(f"no exec in the container: {said(error)}") from error
            raise
        return await self.joined(protocol, ExecStream(engine, stream))

    async def hang_up(self) -> None:
        """Close the client."""
        if self._client is not None:
            await self._client.close()
            self._client = None

    def _engine(self) -> aiodocker.Docker:
        if self._client is None:
            self._client = open_engine(self.kind, self._options)
        return self._client

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
                hint = "; `hermes-rl pool images build` makes it" if image == IMAGE else ""
                raise HostStartFailed(f"the image {image!r} cannot be pulled: {said(error)}{hint}") from error

    def _config(self, name: str, image: str, settings: Json, shared: bool) -> Json:
        """The body of the create request."""
        options, context = self._options, self._context
        scratch = context.scratch_dir or SCRATCH
        variables = loader_settings(context, name, f"unix:{INSIDE}/s", scratch, options.ready_timeout_s)
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


class PodmanProvider(DockerProvider):
    """The same in containers of podman, rootful or rootless, over the socket of `podman system service`."""

    kind = "podman"

    def _gpus(self) -> Json:
        gpus = self._options.gpus
        devices = [f"nvidia.com/gpu={each}" for each in gpus.split(",")] if gpus else []
        return {"Devices": [{"PathOnHost": each} for each in devices]} if devices else {}


class ExecStream:
    """The stream of an exec, and the client that it belongs to."""

    def __init__(self, engine: aiodocker.Docker, stream: Stream) -> None:
        self._engine = engine
        self._stream = stream

    async def send(self, data: bytes) -> None:
        """To the relay's stdin."""
        await self._stream.write_in(data)

    async def received(self) -> AsyncIterator[bytes]:
        """The relay's stdout; what it writes to stderr is for the log."""
        while (message := await self._stream.read_out()) is not None:
            if message.stream == 1:
                yield message.data
            else:
                log.debug("the relay says: %s", message.data.decode(errors="replace").strip())

    async def close(self) -> None:
        """End the exec."""
        with contextlib.suppress(*UNREACHABLE):
            await self._stream.close()
        await self._engine.close()


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
