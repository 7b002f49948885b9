"""How a pool is sized, where its slots run and what it insists on. Strict: an unknown key is refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sandbox_pool.errors import IsolationUnavailable, StateError
from sandbox_pool.spec import SandboxSpec

if TYPE_CHECKING:
    from sandbox_pool.client.host_client import HostInfo

log = logging.getLogger(__name__)

Isolation = Literal["namespaces", "landlock", "uid", "plain"]
"""Strongest first."""
LEVELS: tuple[str, ...] = get_args(Isolation)
_warned: set[tuple[str, tuple[str, ...]]] = set()


def rank(level: str) -> int:
    """0 is the strongest. A variant such as `namespaces-rootless` ranks as the level it begins with."""
    for position, name in enumerate(LEVELS):
        if level == name or level.startswith(f"{name}-"):
            return position
    return len(LEVELS)


def check_isolation(info: HostInfo, wanted: Isolation) -> None:
    """Refuse a host that isolates less than wanted; warn once when it is less than full isolation."""
    if rank(info.isolation) > rank(wanted):
        raise IsolationUnavailable(
            f"{info.host_id} isolates its slots by {info.isolation!r} only ({info.isolation_reason}); "
            f"min_isolation is {wanted!r}"
        )
    seen = (info.isolation, tuple(info.missing))
    if seen in _warned:
        return
    _warned.add(seen)
    if rank(info.isolation) > 0:
        log.warning("slots are isolated by %r only: %s", info.isolation, info.isolation_reason)
    if info.missing:
        log.warning("not enforceable here: %s", ", ".join(info.missing))


class ImageSettings(BaseModel):
    """Where images come from and what their layers may take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mirrors: dict[str, list[str]] = Field(default_factory=dict)
    """By registry, addresses that are asked before it: `{"docker.io": ["https://mirror.example"]}`."""
    max_gb: float = Field(default=50.0, gt=0)
    """What unpacked layers may take on a host; those used longest ago go, never one in use."""
    store_dir: Path | None = None
    """Where hosts keep layers; None: `hermes-rl-images-<uid>` in /scratch, /var/tmp or /tmp."""


class PoolConfig(BaseModel):
    """Frozen settings of one `SlotPool`. Two pools in one process never interfere."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: str = "local"
    """Where slot servers run: a built-in name, the name of an entry point, or `module:Class`."""
    provider_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of that provider alone; it checks them itself and refuses keys it does not know."""
    slots_per_host: int = Field(default=8, ge=1, le=16384)
    spec: SandboxSpec = Field(default_factory=SandboxSpec)
    """Spec of leases that name none; the first `min_hosts` hosts are started for it."""

    min_hosts: int = Field(default=1, ge=0)
    """Hosts kept even when idle; with 1 or more, `start` fails when none of them can be started."""
    max_hosts: int = Field(default=4, ge=1)
    max_starting: int = Field(default=2, ge=1)
    """Hosts that may be starting at the same time, whatever the demand."""
    create_interval_s: float | None = Field(default=None, ge=0)
    """Least time between two creates at one provider, over all processes that share the state directory; None: what
    the provider asks for (modal: a quarter of a second), else 0.1."""
    idle_s: float = Field(default=300.0, gt=0)
    """A host without any lease for so long is stopped, down to `min_hosts`."""

    acquire_timeout_s: float | None = Field(default=600.0, gt=0)
    """How long `lease` waits for a slot when it is given no timeout of its own; None: without limit."""
    lease_ttl_s: float | None = Field(default=None, gt=0)
    """A lease held longer is taken back; its holder then gets `StaleLease`. None: a holder may keep it."""
    lease_idle_s: float | None = Field(default=None, gt=0)
    """A lease that nothing was asked of for so long, and in which no background process runs, is taken back in the same
    way. Longer than a model may take for a turn. None: a holder may rest."""
    exec_timeout_s: float | None = Field(default=None, gt=0)
    """Timeout of commands that are run without one of their own; None: no limit. The agent's tools set theirs."""
    start_timeout_s: float = Field(default=120.0, gt=0)
    start_attempts: int = Field(default=3, ge=1)
    """Host starts that may fail in a row before those who wait for the host get `HostStartFailed`."""
    reset_timeout_s: float = Field(default=60.0, gt=0)
    """A host that has not reset a slot after so long is treated as lost."""
    health_interval_s: float = Field(default=10.0, gt=0)
    health_timeout_s: float = Field(default=10.0, gt=0)
    health_failures: int = Field(default=3, ge=1)
    """Failed health checks in a row after which a host gets no new lease. Leases it holds are left alone."""
    lost_after_s: float = Field(default=120.0, gt=0)
    """A host that answered no health check for so long is treated as lost and replaced."""
    owner_ttl_s: float = Field(default=120.0, gt=0)
    """A slot server that no client has been connected to for so long ends itself."""

    min_isolation: Isolation = "plain"
    """The weakest isolation that is accepted; less raises `IsolationUnavailable` when the pool starts."""
    scratch_dir: Path | None = None
    """Where slots keep their layers; None: /scratch when there is one, else a local disk with room."""
    scratch_warn_mb: int = Field(default=2048, ge=0)
    """Warn when the scratch space has less free."""
    scratch_min_mb: int = Field(default=128, ge=0)
    """Lease nothing more (`ScratchFull`) when the scratch space has less free."""
    images: ImageSettings = Field(default_factory=ImageSettings)
    state_dir: Path | None = None
    """Where the journal lives; None: `$XDG_STATE_HOME/hermes-rl`, else `~/.local/state/hermes-rl`."""
    handle_sigterm: bool = True
    """Close the pool on SIGTERM before the process dies of it, unless the program has its own handler."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_hosts > self.max_hosts:
            raise ValueError(f"min_hosts ({self.min_hosts}) is above max_hosts ({self.max_hosts})")
        return self

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> PoolConfig:
        """Settings from hermes-agent's TERMINAL_* variables, read once."""
        from sandbox_pool.terminal_env import pool_fields, terminal_settings

        return cls.model_validate(pool_fields(terminal_settings(os.environ if environ is None else environ)))

    def resolved_state_dir(self) -> Path:
        """The state directory in force, as an absolute path."""
        if self.state_dir is not None:
            return self.state_dir.expanduser().absolute()
        return default_state_dir()


def default_state_dir() -> Path:
    """`$XDG_STATE_HOME/hermes-rl`, or its standard place below the home directory."""
    base = os.environ.get("XDG_STATE_HOME")
    try:
        return (Path(base).absolute() if base else Path.home() / ".local" / "state") / "hermes-rl"
    except RuntimeError as error:
        raise StateError("this user has no home directory: set `state_dir` or XDG_STATE_HOME") from error
