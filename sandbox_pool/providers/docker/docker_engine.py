"""The engines of docker and podman: which one is meant, and a client of it.

aiodocker does the talking: it is maintained, asynchronous, built on the aiohttp we have, and knows contexts and TLS.
docker-py blocks; podman's own client knows only podman. Over ssh an engine is reached as the docker command reaches it,
by OpenSSH and `docker system dial-stdio`: aiodocker's own way would send this process's environment along, with its
secrets, and needs another ssh than the one people have set up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import ssl
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import aiodocker
import aiohttp
from aiodocker.docker import DockerContextEndpoint
from aiodocker.exceptions import DockerError
from aiohttp.client_proto import ResponseHandler
from pydantic import Field, field_validator

from sandbox_pool.errors import PlaceUnreachable
from sandbox_pool.providers.base import Texts
from sandbox_pool.providers.containers_provider import ContainerOptions, said

IMAGE = "hermes-sandbox:local"
"""What `hermes-rl pool images build` makes. Not `latest`: that Nomad would pull from a registry, whatever is here."""
SCHEMES = ("unix://", "tcp://", "http://", "https://", "ssh://", "npipe://")
SSH = "ssh://"
HELLO = b"HEAD /_ping HTTP/1.1\r\nHost: engine\r\n\r\n"
"""Answered without a body by every engine; what follows on the connection is the client's."""
Json = dict[str, Any]
UNREACHABLE = (DockerError, aiohttp.ClientError, OSError, TimeoutError)


class DockerOptions(ContainerOptions):
    """`provider_options` of the docker and podman providers."""

    host: str | None = None
    """The engine: `unix:///path`, `tcp://host:2376`, `ssh://user@host`, `ssh://user@host/path/of/its/socket`. None:
    DOCKER_HOST (podman: CONTAINER_HOST), the current context, then the usual sockets, this user's own first."""
    cert_path: Path | None = None
    """Folder with ca.pem, cert.pem and key.pem for `tcp://`; None: DOCKER_CERT_PATH where DOCKER_TLS_VERIFY is set."""
    context: str | None = None
    """Name of a docker context."""
    image: str | None = IMAGE
    pull: Literal["missing", "always", "never"] = "missing"
    pull_timeout_s: float = Field(default=1800.0, gt=0)
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


class SshConnector(aiohttp.BaseConnector):
    """Each connection is an ssh process with the engine's own command at its end."""

    # Requests for engines behind sockets have this scheme.
    allowed_protocol_schema_set = aiohttp.UnixConnector.allowed_protocol_schema_set

    def __init__(self, kind: str, url: str, connect_timeout_s: float) -> None:
        super().__init__(limit=0)
        self._url = url
        asked = urlsplit(url)
        there = [kind, *(["-H" if kind == "docker" else "--url", f"unix://{asked.path}"] if asked.path else [])]
        options = ["-T", "-oBatchMode=yes", f"-oConnectTimeout={max(1, round(connect_timeout_s))}"]
        self._command = [*options, "--", f"{SSH}{asked.netloc}", shlex.join([*there, "system", "dial-stdio"])]

    async def _create_connection(self, req: Any, traces: Any, timeout: Any) -> ResponseHandler:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    "ssh",
                    *self._command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=asyncio.subprocess.PIPE,
                )
            ours.setblocking(False)
            await self._greet(ours, process)
            _, protocol = await self._loop.create_connection(self._factory, sock=ours)
        except BaseException:
            ours.close()  # which ends the process
            raise
        return protocol

    async def _greet(self, ours: socket.socket, process: asyncio.subprocess.Process) -> None:
        """Have the engine say a word. When it does not, ssh has said why."""
        assert process.stderr is not None
        answer = b""
        with contextlib.suppress(ConnectionError):  # it ended
            await self._loop.sock_sendall(ours, HELLO)
            while more := await self._loop.sock_recv(ours, 1):
                answer += more
                if answer.endswith(b"\r\n\r\n"):
                    return
        words = (await process.stderr.read()).decode("utf-8", "replace").strip()
        raise aiohttp.ClientConnectionError(f"{self._url}: {words[-300:] or 'ssh ended without a word'}")


class SshEngine(aiodocker.Docker):
    """A client that ends its connector: aiodocker leaves one that it was given open."""

    async def close(self) -> None:
        """End all connections."""
        await super().close()
        await self.connector.close()


def open_engine(kind: str, options: DockerOptions) -> aiodocker.Docker:
    """A client of the engine; needs a running loop. `PlaceUnreachable` when nothing says where it is."""
    own = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    usual = f"{own}/docker.sock"
    if kind == "podman":
        usual = f"{own}/podman/podman.sock" if os.getuid() else "/run/podman/podman.sock"
    timeout = aiohttp.ClientTimeout(total=options.api_timeout_s)
    try:
        options = options.model_copy(update=settled_engine(kind, options))
        url = options.host
        if options.context and not url and (named := _context(options.context)) and named.host.startswith(SSH):
            url = named.host
        if url and url.startswith(SSH):
            return SshEngine("unix://ssh", SshConnector(kind, url, options.api_timeout_s), timeout=timeout)
        if url and url.startswith("tcp://") and options.cert_path:
            secure = _tls(options.cert_path.expanduser())
            return aiodocker.Docker(f"https://{urlsplit(url).netloc}", ssl_context=secure, timeout=timeout)
        if url or kind == "docker":
            with contextlib.suppress(AssertionError):  # it finds no engine
                return aiodocker.Docker(url, context=options.context, timeout=timeout)
        if Path(usual).is_socket():
            return aiodocker.Docker(f"unix://{usual}", timeout=timeout)
    except (DockerError, ValueError, OSError) as error:
        named_so = options.host or options.context or ""
        raise PlaceUnreachable(f"the engine {named_so} cannot be used: {said(error)}") from error
    raise PlaceUnreachable(
        f"no {kind} engine listens at {usual} or its other usual places; {_host_variable(kind)} names none"
    )


def settled_engine(kind: str, options: DockerOptions) -> Json:
    """What the options leave to the environment and to the docker command's current context."""
    found: Json = {}
    if not options.host and not options.context:
        if host := os.environ.get(_host_variable(kind)):
            found["host"] = host
        elif kind == "docker" and (endpoint := _context(None)):
            found["context"] = endpoint.context_name
    if os.environ.get("DOCKER_TLS_VERIFY") and not options.cert_path:
        found["cert_path"] = Path(os.environ.get("DOCKER_CERT_PATH") or "~/.docker").expanduser()
    return found


def _host_variable(kind: str) -> str:
    return "CONTAINER_HOST" if kind == "podman" else "DOCKER_HOST"


def _context(name: str | None) -> DockerContextEndpoint | None:
    # Private, but the one place that knows which context is the current one.
    return aiodocker.Docker._get_docker_context_endpoint(name)


def _tls(folder: Path) -> ssl.SSLContext:
    """Of the files that the docker command would use."""
    for name in ("ca.pem", "cert.pem", "key.pem"):
        if not (folder / name).is_file():
            raise ValueError(f"there is no {folder / name}")
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    return context
