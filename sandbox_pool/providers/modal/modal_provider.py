"""Hosts in Modal sandboxes: each one sandbox with a slot server, reached through a TLS tunnel or an exec.

    start   build the image once, create the sandbox under the host's name, send token and slot server to its loader,
            and check which host answers
    watch   one long poll per sandbox; one that has ended, for whatever reason, is a lost host
    stop    terminate by handle or by name, and wait until Modal confirms the end
    list    every sandbox of the app with our tag, with the owner from its tags

A create takes Modal seconds; so a sandbox has many slots, and a task takes one of them in milliseconds. Nothing that
Modal stores is secret: arguments name hashes of token and server.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import modal

from sandbox_pool.client.connection import dial
from sandbox_pool.errors import HostStartFailed, PlaceUnreachable, SandboxLost
from sandbox_pool.images.image_source import is_for_slots
from sandbox_pool.providers.base import Host, HostRecord, ProviderContext
from sandbox_pool.providers.modal.modal_calls import SDK_ERRORS, ModalFault, ModalMissing, ask, fault
from sandbox_pool.providers.modal.modal_exec import ExecHost, ExecPath
from sandbox_pool.providers.modal.modal_options import ModalOptions
from sandbox_pool.providers.modal.modal_sandboxes import TAG_HOST, TAG_OWNER, OpenSandbox, Sandboxes
from sandbox_pool.providers.remote_start import load_server, loader_settings, loader_text, packed_server
from sandbox_pool.spec import SandboxSpec

log = logging.getLogger(__name__)

CREATES_PER_S = 4.0
"""Modal refuses more than 5 creates per second of a workspace unless something else was agreed."""
SCRATCH = Path("/var")
Records = list[HostRecord]
Kind = Literal["registry", "dockerfile", "published", "id", "default"]
KINDS: tuple[Kind, ...] = ("registry", "dockerfile", "published", "id")
DEFAULT_PYTHON = "3.12"
RECIPE_ERRORS: tuple[type[BaseException], ...] = (ValueError, *SDK_ERRORS)


@dataclass(frozen=True)
class ImageName:
    """Where an image comes from."""

    kind: Kind
    text: str

    @classmethod
    def parse(cls, named: str | None) -> ImageName:
        """`registry:TAG`, `dockerfile:PATH`, `published:NAME`, `id:IMAGE_ID`; a plain text is a registry's tag."""
        if named is None:
            return cls("default", "")
        word, colon, rest = named.partition(":")
        for kind in KINDS:
            if colon and word == kind:
                if not rest:
                    raise ValueError(f"the image {named!r} names nothing: `{kind}:` is followed by what to take")
                return cls(kind, rest)
        return cls("registry", named)

    def recipe(self, options: ModalOptions) -> Any:
        """The image in the SDK's terms, not built yet."""
        secret = named_secret(options.registry_secret, options) if options.registry_secret else None
        if self.kind == "default":
            return modal.Image.debian_slim(python_version=options.add_python or DEFAULT_PYTHON)
        if self.kind == "published":
            return modal.Image.from_name(self.text, environment_name=options.environment)
        if self.kind == "id":
            return modal.Image.from_id(self.text)
        if self.kind == "registry":
            image = modal.Image.from_registry(self.text, secret=secret, add_python=options.add_python)
        else:
            path = Path(self.text).expanduser()
            if not path.is_file():
                raise ValueError(f"there is no Dockerfile {self.text!r}")
            image = modal.Image.from_dockerfile(
                path,
                context_dir=options.context_dir or path.parent,
                registry_secret=secret,
                add_python=options.add_python,
            )
        # Its own entrypoint would be put before the command of the sandbox.
        return image.entrypoint([])


def named_secret(name: str, options: ModalOptions) -> Any:
    """A secret of the account, in the SDK's terms."""
    return modal.Secret.from_name(name, environment_name=options.environment)


class Images:
    """Built images by name. Starts that need the same one wait for the same build."""

    def __init__(self, options: ModalOptions) -> None:
        self._options = options
        self._builds: dict[str | None, asyncio.Task[Any]] = {}

    async def built(self, named: str | None, app: Any) -> Any:
        """The image, ready to use. Cancelling one caller does not stop the build: others may need it."""
        task = self._builds.get(named)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._builds[named] = asyncio.get_running_loop().create_task(self._build(named, app))
        return await asyncio.shield(task)

    async def _build(self, named: str | None, app: Any) -> Any:
        what = f"image {named or 'of Modal'}"
        try:
            image = ImageName.parse(named).recipe(self._options)
        except RECIPE_ERRORS as error:
            raise fault(what, error) from error
        return await ask(what, image.build.aio(app), self._options.build_timeout_s)

    async def close(self) -> None:
        """Stop waiting for builds; Modal keeps what it has built."""
        for task in self._builds.values():
            task.cancel()
        await asyncio.gather(*self._builds.values(), return_exceptions=True)
        self._builds.clear()


class ModalProvider:
    """Starts slot servers in Modal sandboxes."""

    adopts = True
    create_interval_s = 1 / CREATES_PER_S

    def __init__(self, context: ProviderContext, options: Mapping[str, Any]) -> None:
        self._context = context
        self._options = ModalOptions.resolve(options)
        ImageName.parse(self._options.image)
        self._images = Images(self._options)
        self._sandboxes = Sandboxes(self._options)
        self._tell_lost: Callable[[str, str], None] = lambda name, reason: None
        self._app_found: Any = None
        self._guarded: set[str] = set()
        self._tunnelled = self._options.tunnelled
        self._exec_path = ExecPath()

    def host_key(self, spec: SandboxSpec) -> str:
        """A server builds each slot for the spec of its lease; only image and secrets belong to the sandbox."""
        text = repr((self._image(spec), self._options.secrets))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def on_host_lost(self, callback: Callable[[str, str], None]) -> None:
        """Part of ReportsLoss."""
        self._tell_lost = callback

    async def dial(self, protocol: asyncio.Protocol, address: str) -> asyncio.Transport:
        """Part of Dials: through a tunnel, or through an exec."""
        return await (self._exec_path.dial if ExecPath.knows(address) else dial)(protocol, address)

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        """Create the host's sandbox, or find the one of this name."""
        try:
            box = await self._sandboxes.start(name, lambda: self._arguments(name, spec))
            if box.ended.done():
                raise SandboxLost(f"{name}: {box.ended.result()}")
            address = await self._address(box)
        except ModalFault as error:
            kind = HostStartFailed if self._sandboxes.may_exist(name) else PlaceUnreachable
            raise kind(f"{name}: {error}") from error
        token = self._context.token(name)
        try:
            async with asyncio.timeout(self._options.ready_timeout_s):
                await box.unless_ended(load_server(name, address, token, packed_server()[0], self.dial))
        except TimeoutError as error:
            hint = "; can this machine reach Modal's tunnels? `data_path: exec` needs none" if self._tunnelled else ""
            raise HostStartFailed(
                f"{name}: the slot server in {box.sandbox.object_id} did not answer at {address} in "
                f"{self._options.ready_timeout_s:g} s{hint}"
            ) from error
        self._guard(box)
        return Host(
            name,
            address,
            token,
            identity=box.sandbox.object_id,
            expires_at_s=box.expires_at_s,
            drain_s=self._options.drain_s,
        )

    async def stop(self, name: str) -> None:
        """Terminate the host's sandbox and wait until it is over. Raises when that cannot be confirmed."""
        self._guarded.discard(name)
        await self._sandboxes.stop(name)
        self._exec_path.drop(name)

    async def list(self) -> Records:
        """Every host of this project in the app that runs, whoever started it."""
        try:
            app = await self._app(create=False)
        except ModalMissing:
            return []
        return [
            HostRecord(tags.get(TAG_HOST, sandbox_id), tags.get(TAG_OWNER, ""), "running", detail=sandbox_id)
            for sandbox_id, tags in await self._sandboxes.listed(app.app_id)
        ]

    async def close(self) -> None:
        """End what was being made, and stop watching."""
        self._guarded.clear()
        await self._exec_path.close()
        await self._images.close()
        await self._sandboxes.close()

    def _guard(self, box: OpenSandbox) -> None:
        """Report when the sandbox ends, unless it is stopped before."""

        def tell(ended: asyncio.Task[str]) -> None:
            if box.name in self._guarded:
                self._guarded.discard(box.name)
                self._tell_lost(box.name, ended.result())

        if box.name not in self._guarded:
            self._guarded.add(box.name)
            box.ended.add_done_callback(tell)

    def _image(self, spec: SandboxSpec) -> str | None:
        """The image of sandboxes for this spec; directories, layouts and archives are for its slots."""
        named = spec.image if spec.image and not is_for_slots(spec.image) else None
        return named or self._options.image

    async def _app(self, *, create: bool) -> Any:
        if self._app_found is None:
            options = self._options
            looking = modal.App.lookup.aio(options.app, environment_name=options.environment, create_if_missing=create)
            self._app_found = await ask(f"app {options.app}", looking, options.api_timeout_s)
        return self._app_found

    async def _arguments(self, name: str, spec: SandboxSpec) -> Mapping[str, Any]:
        """What `Sandbox.create` is called with."""
        app, image = await self._app(create=True), self._image(spec)
        return {
            "command": await asyncio.to_thread(self._command, name, image),
            "app": app,
            "image": await self._images.built(image, app),
            "secrets": [named_secret(each, self._options) for each in self._options.secrets],
            "tags": {TAG_OWNER: self._context.owner},
            **self._options.create_arguments(),
        }

    def _command(self, name: str, image: str | None) -> tuple[str, ...]:
        """The loader and its settings. Not as environment variables: with GPUs they cost a secret per create."""
        options, context = self._options, self._context
        bind, scratch = "0.0.0.0" if self._tunnelled else "127.0.0.1", context.scratch_dir or SCRATCH
        variables = {
            **loader_settings(context, name, bind, scratch, options.ready_timeout_s),
            "HRL_PORT": options.port,
            **({"HRL_SECRETS": "1"} if options.secrets else {}),
        }
        server = context.server_arguments(name, options.level, image)
        settings = [f"{key}={value}" for key, value in variables.items()]
        return "env", *settings, options.python, "-c", loader_text(), *server

    async def _address(self, box: OpenSandbox) -> str:
        if not self._tunnelled:
            target = f"tcp:127.0.0.1:{self._options.port}"
            inside = ExecHost(box.sandbox, target, box.expires_at_s, self._options.python)
            return self._exec_path.add(box.name, inside)
        asking = box.sandbox.tunnels.aio(timeout=int(self._options.api_timeout_s))
        tunnels = await ask(f"tunnels of {box.name}", asking, self._options.api_timeout_s)
        if self._options.port not in tunnels:
            raise HostStartFailed(f"{box.name}: Modal gave {box.sandbox.object_id} no tunnel to {self._options.port}")
        host, port = tunnels[self._options.port].tls_socket
        return f"tls:{host}:{port}"
