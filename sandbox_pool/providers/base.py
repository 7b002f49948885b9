"""What a provider must offer: start a slot server under a given name, stop it, and list what there is.

The contract, in the order in which providers get it wrong:

- **The name is the identity.** `start(name, spec)` called twice gives the same host. When a create ends ambiguously (a
  timeout, a cut connection), calling `start` again finds what was created, or `stop(name)` makes sure there is nothing.
- **`stop` is idempotent and certain.** It returns when the host and all it left behind are gone, also when
  there never was such a host, and raises when it cannot be sure. The pool keeps the name in its journal until `stop`
  returned.
- **`list` shows everything this project ever started there** that still exists, with the owner's tag: it finds hosts
  by labels, never by the journal, so that a lost journal loses nothing.
- **A host is never silently another host.** A provider whose scheduler replaces what died (Nomad does) must compare the
  identity behind the name and raise `SandboxLost`.
- Cancelling `start` may leave something behind: the pool always calls `stop` afterwards.

A third-party provider is a class `Provider(context, options)` under the entry point group `hermes_rl.providers`, or
named as `module:Class` in the config. `hermes-rl pool check --provider module:Class` tells whether it keeps all
promises.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, cast, runtime_checkable

from pydantic import BaseModel, BeforeValidator, ValidationError

from sandbox_pool.config import ImageSettings, Isolation, PoolConfig
from sandbox_pool.errors import (
    HostStartFailed,
    IsolationUnavailable,
    SandboxError,
    ScratchFull,
    StateError,
    did_you_mean,
    first_invalid,
)
from sandbox_pool.journal.journal import private_state_dir, without_secrets
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    import asyncio


def _as_list(value: Any) -> Any:
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


Options = TypeVar("Options", bound=BaseModel)
Texts = Annotated[tuple[str, ...], BeforeValidator(_as_list)]


ENTRY_POINT_GROUP = "hermes_rl.providers"
KEY_BYTES = 32
DEFAULT_CREATE_INTERVAL_S = 0.1


@dataclass(frozen=True)
class Host:
    """A slot server that was started and can be reached."""

    name: str
    address: str
    """`unix:/path`, `tcp:host:port` or `tls:host:port`; whatever a provider that dials itself understands (`Dials`)."""
    token: str
    identity: str = ""
    """What is behind the name (an allocation id, a sandbox id, a pid): another one is another host."""
    expires_at_s: float | None = None
    """Unix time at which the provider ends the host (Modal: after 24 h at most); the pool replaces it before."""
    drain_s: float = 60.0
    """How long before that it gets no new leases, so that those it has can finish."""

    def __repr__(self) -> str:
        return f"Host(name={self.name!r}, address={self.address!r}, identity={self.identity!r})"


@dataclass(frozen=True)
class HostRecord:
    """Something of this project that still exists at the provider."""

    name: str
    owner: str
    """Tag of the process that started it (`sandbox_pool.journal.owner`); empty when it is not known."""
    state: str
    """starting, running or dead (only remains)"""
    created_s: float = 0.0
    detail: str = ""


@dataclass(frozen=True)
class ProviderContext:
    """What the pool tells a provider about the hosts it wants."""

    owner: str
    slots: int
    state_dir: Path
    min_isolation: Isolation = "plain"
    scratch_dir: Path | None = None
    scratch_min_mb: int = 0
    owner_ttl_s: float = 120.0
    images: ImageSettings = field(default_factory=ImageSettings)

    @classmethod
    def of(cls, config: PoolConfig, owner: str) -> ProviderContext:
        """Context for the pool with this config."""
        return cls(
            owner=owner,
            slots=config.slots_per_host,
            state_dir=config.resolved_state_dir(),
            min_isolation=config.min_isolation,
            scratch_dir=config.scratch_dir,
            scratch_min_mb=config.scratch_min_mb,
            owner_ttl_s=config.owner_ttl_s,
            images=config.images,
        )

    def settings(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What the journal keeps, so that `gc` can build this provider again in another process."""
        return {
            "slots": self.slots,
            "min_isolation": self.min_isolation,
            "scratch_dir": str(self.scratch_dir) if self.scratch_dir else None,
            "options": without_secrets(dict(options)),
        }

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], *, owner: str, state_dir: Path) -> ProviderContext:
        """The context that wrote these settings, for another owner."""
        scratch_dir = settings.get("scratch_dir")
        return cls(
            owner=owner,
            slots=int(settings["slots"]),
            state_dir=state_dir,
            min_isolation=settings["min_isolation"],
            scratch_dir=Path(scratch_dir) if scratch_dir else None,
        )

    def server_arguments(self, host_id: str, level: str | None, image: str | None = None) -> list[str]:
        """What every slot server of this pool is started with, wherever it runs."""
        arguments = ["--slots", str(self.slots), "--host-id", host_id]
        arguments += ["--min-isolation", self.min_isolation, "--owner-ttl-s", f"{self.owner_ttl_s:g}"]
        arguments += ["--images-max-gb", f"{self.images.max_gb:g}"]
        if self.images.store_dir is not None:
            arguments += ["--images", str(self.images.store_dir)]
        if level:
            arguments += ["--level", level]
        if image is not None:
            arguments += ["--image", image]
        return arguments

    def token(self, name: str) -> str:
        """The host's bearer token: derived from its name and a key only this user can read, so it is stored nowhere."""
        return hmac.new(_pool_key(self.state_dir), name.encode(), hashlib.sha256).hexdigest()


class Provider(Protocol):
    """A way to start the slot server somewhere and reach it."""

    async def start(self, name: str, spec: SandboxSpec) -> Host:
        """Start the host of this name, or find it when it is already there."""

    async def stop(self, name: str) -> None:
        """Make sure that there is no such host and nothing of it left."""

    async def list(self) -> list[HostRecord]:
        """Everything this project ever started there and that still exists."""


@runtime_checkable
class KeysHosts(Protocol):
    """Optional: says which specs can share a host. Without it every spec has hosts of its own."""

    def host_key(self, spec: SandboxSpec) -> str:
        """Specs with the same key can share a host."""


@runtime_checkable
class Adopts(Protocol):
    """Optional: hosts outlive the process that started them, and `start` finds a running one by its name.

    A new pool then takes over the running hosts of a dead one and resets every slot, instead of paying for new ones.
    """

    adopts: bool


@runtime_checkable
class Paces(Protocol):
    """Optional: limits how often a host may be created; a config may set another rate."""

    create_interval_s: float
    """Least time between two creates."""


@runtime_checkable
class ReportsLoss(Protocol):
    """Optional: reports that a host is gone. A connection does not show it when a whole machine is cut off."""

    def on_host_lost(self, callback: Callable[[str, str], None]) -> None:
        """Call back with name and reason, in the pool's loop, for hosts that were started and not stopped."""


@runtime_checkable
class Dials(Protocol):
    """Optional: opens connections itself, because no socket leads to the hosts (or not to all of them)."""

    async def dial(self, protocol: asyncio.Protocol, address: str) -> asyncio.Transport:
        """Put the protocol on a transport to the slot server at this address; called in any loop, once per connection.

        OSError or TimeoutError when there is no answer. `sandbox_pool.client.connection.dial` knows the ordinary
        addresses.
        """


@runtime_checkable
class Settles(Protocol):
    """Optional: takes part of its options from the environment. The journal keeps what they were, so that a `gc` with
    another environment looks at the same place."""

    def settled(self) -> Mapping[str, Any]:
        """Options that give this place anywhere."""


@runtime_checkable
class HasJob(Protocol):
    """Optional: hosts are started from a job description that people may want to read, change or register."""

    def job(self, spec: SandboxSpec) -> dict[str, Any]:
        """The job of hosts for this spec."""


@runtime_checkable
class Closes(Protocol):
    """Optional: has connections of its own to close when the pool is done."""

    async def close(self) -> None:
        """Release what the provider itself holds; hosts are already stopped."""


def start_error(name: str, message: str) -> SandboxError:
    """The error that a slot server's message about its failed start stands for."""
    for kind in (IsolationUnavailable, ScratchFull):
        if kind.__name__ in message:
            return kind(f"{name}: {message}")
    return HostStartFailed(f"{name}: {message}")


def create_interval_s(provider: Provider, configured_s: float | None) -> float:
    """Least time between two creates: as configured, else as the provider says, else the default."""
    if configured_s is not None:
        return configured_s
    return provider.create_interval_s if isinstance(provider, Paces) else DEFAULT_CREATE_INTERVAL_S


def host_keys(provider: Provider) -> Callable[[SandboxSpec], str]:
    """Which hosts may serve a spec: as the provider says, else only those started for the same spec."""
    return provider.host_key if isinstance(provider, KeysHosts) else SandboxSpec.key


BUILT_IN = {
    "apptainer": "sandbox_pool.providers.apptainer:ApptainerProvider",
    "daytona": "sandbox_pool.providers.daytona.daytona_provider:DaytonaProvider",
    "docker": "sandbox_pool.providers.docker.docker_provider:DockerProvider",
    "local": "sandbox_pool.providers.local:LocalProvider",
    "modal": "sandbox_pool.providers.modal.modal_provider:ModalProvider",
    "nomad": "sandbox_pool.providers.nomad.nomad_provider:NomadProvider",
    "podman": "sandbox_pool.providers.docker.docker_provider:PodmanProvider",
    "slurm": "sandbox_pool.providers.slurm:SlurmProvider",
    "ssh": "sandbox_pool.providers.ssh:SshProvider",
}


EXTRAS = frozenset({"daytona", "docker", "modal", "podman"})
"""Built-in providers that need packages of their own, by the name of the extra."""


def provider_names() -> list[str]:
    """Names that can be given without a module path: built-in ones and installed entry points."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def checked_options(model: type[Options], options: Mapping[str, Any]) -> Options:
    """A provider's options; ValueError names the first that is wrong, and the nearest name of an unknown one."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise ValueError(f"provider option {first_invalid(error, model)}") from error


def load_provider(name: str, context: ProviderContext, options: Mapping[str, Any]) -> Provider:
    """Make the provider of this name; an unknown name raises `ValueError`."""
    if name == "local" and sys.platform != "linux":
        others = ", ".join(other for other in provider_names() if other != "local")
        raise ValueError(f"slots of this machine need Linux; from here they can be driven elsewhere: {others}")
    target = BUILT_IN.get(name)
    if target is None and ":" in name:
        target = name
    if target is None:
        points = [point for point in entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
        if not points:
            raise ValueError(
                f"there is no provider {name!r}; {did_you_mean(name, provider_names())}, or give module:Class"
            )
        target = points[0].value
    module_name, _, class_name = target.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        hint = f"; pip install 'hermes-rl[{name}]'" if name in EXTRAS and isinstance(error, ImportError) else ""
        raise ValueError(f"the provider {name!r} cannot be loaded: {error}{hint}") from error
    try:
        provider = factory(context, options)
    except TypeError as error:
        raise ValueError(f"{name!r} is not a provider: it is made with a context and options: {error}") from error
    if lacking := [method for method in ("start", "stop", "list") if not callable(getattr(provider, method, None))]:
        raise ValueError(f"{name!r} is not a provider: it has no method {lacking[0]!r}")
    return cast("Provider", provider)


def _pool_key(state_dir: Path) -> bytes:
    """The user's key, made on first use. Linked into place, so two processes that race agree on one."""
    path = state_dir / "pool.key"
    private_state_dir(state_dir)
    try:
        if not path.exists():
            draft = state_dir / f".pool.key.{os.getpid()}.{secrets.token_hex(4)}"
            draft.touch(mode=0o600)
            try:
                draft.write_bytes(secrets.token_bytes(KEY_BYTES))
                path.hardlink_to(draft)
            except FileExistsError:
                pass  # another process was first: its key is used
            finally:
                draft.unlink()
        key = path.read_bytes()
    except OSError as error:
        raise StateError(f"the key {path} cannot be used: {error.strerror or error}") from error
    if len(key) != KEY_BYTES:
        raise StateError(
            f"the key {path} is damaged ({len(key)} bytes instead of {KEY_BYTES}): delete it, and a new one is made"
        )
    return key
