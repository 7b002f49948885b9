"""Settings of the Modal provider, from `provider_options`. Account and token come from the SDK's own settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sandbox_pool.errors import did_you_mean
from sandbox_pool.providers.base import Texts, checked_options

DAY_S = 24 * 3600
DataPath = Literal["tunnel", "exec", "auto"]


class ModalOptions(BaseModel):
    """`provider_options` of the Modal provider."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    app: str = Field(default="hermes-rl", pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """The app that all sandboxes belong to; made when it is missing."""
    environment: str | None = None
    """Modal environment; None: the one of the SDK's profile."""

    image: str | None = None
    """Image of the sandboxes unless a spec names its own, as `registry:TAG`, `dockerfile:PATH`, `published:NAME` or
    `id:IMAGE_ID`; text without such a word is a registry's tag. None: Modal's Debian with Python."""
    add_python: str | None = None
    """Version of Python to add to registry and Dockerfile images that have none, e.g. `3.12`."""
    registry_secret: str | None = None
    """Name of the Modal secret with which a private registry is read."""
    context_dir: str | None = None
    """What a Dockerfile may copy from; None: the folder it is in."""
    python: str = "python3"
    """Interpreter of the slot server in the image, 3.9 or later."""
    level: str | None = None
    """Build slots at this isolation level instead of the strongest that works in the sandbox."""

    cpu: float | None = Field(default=None, gt=0)
    cpu_limit: float | None = Field(default=None, gt=0)
    memory_mb: int | None = Field(default=None, ge=128)
    memory_limit_mb: int | None = Field(default=None, ge=128)
    """What one sandbox asks for (and is billed for at least), and what it can never exceed. None: Modal's defaults."""
    gpu: str | None = None
    region: Texts = ()
    cloud: str | None = None
    runtime: Literal["gvisor", "vm"] | None = None
    secrets: Texts = ()
    """Names of Modal secrets for the sandbox's first process. Slots never see them: give commands their `spec.env`."""

    block_network: bool = False
    """No network for the sandbox at all. There are no tunnels then: commands go through `Sandbox.exec`."""
    outbound_cidrs: Texts | None = None
    outbound_domains: Texts | None = None
    """What slots with `network: host` may reach; None: everything. Modal looks at TLS server names, DNS stays open."""
    inbound_cidrs: Texts | None = None
    """From where the tunnel may be reached; None: from everywhere, with the host's token."""
    data_path: DataPath = "auto"
    """How slots are reached: a TLS `tunnel`, or `exec` through Modal's own channel; `auto`: a tunnel if possible."""
    port: int = Field(default=8787, ge=1024, le=65535)

    timeout_s: int = Field(default=4 * 3600, ge=60, le=DAY_S)
    """Modal ends a sandbox after so long; the pool replaces it before."""
    drain_s: float = Field(default=1800.0, ge=0)
    """How long before that a sandbox gets no new leases, so that those it has can finish: the longest task."""
    idle_timeout_s: int | None = Field(default=300, ge=1)
    """Modal ends a sandbox without a tunnel connection or a running command after so long: in case its client died."""

    create_timeout_s: float = Field(default=60.0, gt=0)
    """How long one create may take, throttling by Modal included."""
    build_timeout_s: float = Field(default=1800.0, gt=0)
    ready_timeout_s: float = Field(default=60.0, gt=0)
    """How long a sandbox may take from its create until its slot server answers."""
    stop_timeout_s: float = Field(default=50.0, gt=0)
    api_timeout_s: float = Field(default=30.0, gt=0)
    settle_s: float = Field(default=5.0, ge=0)
    """How long a create without an answer is looked for by its name before it counts as never made."""

    @classmethod
    def resolve(cls, options: Mapping[str, Any]) -> ModalOptions:
        """Check the options; an unknown one is refused with the nearest name."""
        for name in options:
            if name not in cls.model_fields:
                hint = did_you_mean(name, cls.model_fields)
                raise ValueError(f"provider_options of modal: unknown option {name!r}; {hint}")
        return checked_options(cls, options)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.block_network and self.data_path == "tunnel":
            raise ValueError("block_network leaves no tunnel: use data_path exec or auto")
        allowlists = (self.outbound_cidrs, self.outbound_domains, self.inbound_cidrs)
        if self.block_network and allowlists != (None, None, None):
            raise ValueError("block_network and an allowlist exclude each other")
        if self.timeout_s < self.drain_s + self.ready_timeout_s + 60:
            raise ValueError(
                f"timeout_s ({self.timeout_s}) must be longer than drain_s ({self.drain_s:g}) and a start: "
                "a sandbox would be replaced before it has served anybody"
            )
        for wanted, limit in (("cpu", "cpu_limit"), ("memory_mb", "memory_limit_mb")):
            if getattr(self, limit) is not None and getattr(self, wanted) is None:
                raise ValueError(f"{limit} needs {wanted}: Modal takes both or only the request")
        return self

    @property
    def tunnelled(self) -> bool:
        """Whether slots are reached through a tunnel."""
        return self.data_path == "tunnel" or (self.data_path == "auto" and not self.block_network)

    def create_arguments(self) -> dict[str, Any]:
        """Arguments of `Sandbox.create` from these settings; what is not set is left to Modal."""
        arguments: dict[str, Any] = {
            "cpu": (self.cpu, self.cpu_limit) if self.cpu_limit else self.cpu,
            "memory": (self.memory_mb, self.memory_limit_mb) if self.memory_limit_mb else self.memory_mb,
            "gpu": self.gpu,
            "region": list(self.region) or None,
            "cloud": self.cloud,
            "runtime": self.runtime,
            "block_network": self.block_network or None,
            "outbound_cidr_allowlist": _listed(self.outbound_cidrs),
            "outbound_domain_allowlist": _listed(self.outbound_domains),
            "inbound_cidr_allowlist": _listed(self.inbound_cidrs),
            "encrypted_ports": [self.port] if self.tunnelled else None,
            "timeout": self.timeout_s,
            "idle_timeout": self.idle_timeout_s,
        }
        return {name: value for name, value in arguments.items() if value is not None}


def _listed(values: tuple[str, ...] | None) -> list[str] | None:
    return None if values is None else list(values)
