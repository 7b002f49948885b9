"""What a task needs from its sandbox. The hash of a spec is the pool key: a slot never serves another spec."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator

from sandbox_pool.errors import first_invalid
from sandbox_pool.server.network_rules import EGRESS, parse_rule

MOST_PATH = 1024


def _checked(entry: str) -> str:
    parse_rule(entry)
    return entry


HostEntry = Annotated[str, AfterValidator(_checked)]
"""`example.org`, `*.example.net` (names below it), `example.org:8443`, `*`; without a port 80 and 443 are meant."""


class NetworkRules(BaseModel):
    """Hosts that a slot may reach, by HTTP and HTTPS through the proxy that its environment names."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow: tuple[HostEntry, ...] = ()
    """What may be reached; empty: nothing, and every host asked for is recorded all the same."""
    prepare: tuple[HostEntry, ...] | Literal["egress"] | None = None
    """What may be reached instead while an environment's `prepare` runs; None: the same."""
    max_mb: int = Field(default=4096, gt=0)
    """What a lease may send and receive in all."""

    @field_validator("prepare", mode="before")
    @classmethod
    def _one_of_the_kinds(cls, value: Any) -> Any:
        if value is not None and value != "egress" and not isinstance(value, list | tuple):
            raise ValueError("it is egress or a list of hosts")
        return value

    def prepare_entries(self) -> tuple[str, ...] | None:
        """The list that holds during `prepare`, when it is another one."""
        return EGRESS if self.prepare == "egress" else self.prepare


NetworkName = Literal["none", "egress", "host"]
NETWORKS: tuple[str, ...] = get_args(NetworkName)


class Mount(BaseModel):
    """A folder or file of the machine the slots run on, put into each of them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    """Path on that machine. What holds the pool's own files or the system's (/, /proc, /run, ...) is refused."""
    target: str
    """Path in the slot; what is missing of it is made, and no link on the way is followed."""
    read_only: bool = True
    """Slots that may write change the folder for every other slot and for the machine."""

    @field_validator("source", "target")
    @classmethod
    def _is_whole(cls, path: str) -> str:
        if not path.startswith("/") or ".." in path.split("/") or "\0" in path or len(path) > MOST_PATH:
            raise ValueError("a mount needs absolute paths without '..'")
        return os.path.normpath(path).replace("//", "/")

    @field_validator("target")
    @classmethod
    def _is_free(cls, path: str) -> str:
        if path == "/" or path.split("/")[1] in ("proc", "sys", "dev"):
            raise ValueError(f"{path} of a slot is its own: mount to another folder")
        return path


class SandboxSpec(BaseModel):
    """Frozen description of a slot: root, limits, network, environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str | None = None
    """Root file system: None is the host's own, as much of it as slots may see. Else a directory of the host,
    `oci:DIR[:TAG]`, `oci-archive:FILE[:TAG]`, `docker-archive:FILE`, `dockerfile:DIR`, or an image of a registry."""
    user: str | None = None
    """Who commands run as in an image: `name`, `uid`, `name:group` or `uid:gid`; None: as the image says, else root."""
    network: NetworkName | NetworkRules = "none"
    """`none`: a loopback of its own. `{allow: [...]}`: the same, and a proxy to the hosts listed. `egress`: a proxy to
    every public host. `host`: the host's network, with every service on its loopback and its private networks."""
    cpu: float | None = Field(default=None, gt=0)
    """Cores; None: no limit."""
    memory_mb: int | None = Field(default=2048, gt=0)
    disk_mb: int | None = Field(default=1024, gt=0)
    """What commands may write, /dev/shm included."""
    pids: int | None = Field(default=512, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of every command, on top of a minimal one. The server's own environment is never visible."""
    files: dict[str, bytes] = Field(default_factory=dict)
    """Files put into the workspace at the start of each lease: path -> content."""
    workdir: str | None = None
    """Where commands start; None: as the image says, else /workspace."""
    mounts: tuple[Mount, ...] = Field(default=(), max_length=8)
    """Folders of the machine the slots run on; only where slots have a root of their own."""
    login: bool = False
    """Commands get the environment of a login shell: the profiles of the image, sourced once before anybody works."""

    @field_validator("network", mode="before")
    @classmethod
    def _one_of_the_kinds(cls, value: Any) -> Any:
        """In one sentence about the kind that was meant, not one about each kind."""
        if value in NETWORKS or isinstance(value, NetworkRules):
            return value
        if not isinstance(value, Mapping):
            raise ValueError("it is none, egress, host, or hosts as in {allow: [example.org]}")
        try:
            return NetworkRules.model_validate(value)
        except ValidationError as error:
            raise ValueError(first_invalid(error, NetworkRules)) from None

    def key(self) -> str:
        """Stable short hash of everything that makes slots interchangeable."""
        files = {path: hashlib.sha256(content).hexdigest() for path, content in self.files.items()}
        text = json.dumps([self.model_dump(mode="json", exclude={"files"}), files], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
