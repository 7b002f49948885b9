"""What a task needs from its sandbox. The hash of a spec is the pool key: a slot never serves another spec."""

from __future__ import annotations

import hashlib
import json
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Network = Literal["none", "host"]


class SandboxSpec(BaseModel):
    """Frozen description of a slot: root, limits, network, environment."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str | None = None
    """Root file system: None is the host's own, as much of it as slots may see. Else a directory of the host,
    `oci:DIR[:TAG]`, `oci-archive:FILE[:TAG]`, `docker-archive:FILE`, `dockerfile:DIR`, or an image of a registry."""
    user: str | None = None
    """Who commands run as in an image: `name`, `uid`, `name:group` or `uid:gid`; None: as the image says, else root."""
    network: Network = "none"
    """`none`: a network namespace with loopback only. `host`: the host's network, for tasks that need it."""
    cpu: float | None = Field(default=None, gt=0)
    """Cores; None: no limit."""
    memory_mb: int | None = Field(default=2048, gt=0)
    disk_mb: int | None = Field(default=1024, gt=0)
    pids: int | None = Field(default=512, gt=0)
    env: dict[str, str] = Field(default_factory=dict)
    """Environment of every command, on top of a minimal one. The server's own environment is never visible."""
    files: dict[str, bytes] = Field(default_factory=dict)
    """Files put into the workspace at the start of each lease: path -> content."""
    workdir: str | None = None
    """Where commands start; None: as the image says, else /workspace."""

    def key(self) -> str:
        """Stable short hash of everything that makes slots interchangeable."""
        files = {path: hashlib.sha256(content).hexdigest() for path, content in self.files.items()}
        text = json.dumps([self.model_dump(mode="json", exclude={"files"}), files], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
