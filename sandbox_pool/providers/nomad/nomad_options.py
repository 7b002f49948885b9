"""Settings of the Nomad provider: from `provider_options`, and what is left open from the usual NOMAD_* variables."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sandbox_pool.providers.base import Texts, checked_options

VARIABLES = {
    "address": "NOMAD_ADDR",
    "namespace": "NOMAD_NAMESPACE",
    "region": "NOMAD_REGION",
    "ca_cert": "NOMAD_CACERT",
    "ca_path": "NOMAD_CAPATH",
    "client_cert": "NOMAD_CLIENT_CERT",
    "client_key": "NOMAD_CLIENT_KEY",
    "tls_server_name": "NOMAD_TLS_SERVER_NAME",
    "tls_skip_verify": "NOMAD_SKIP_VERIFY",
}
"""Option -> the variable that Nomad's own command line reads for the same thing."""


class NomadOptions(BaseModel):
    """`provider_options` of the Nomad provider."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    address: str = "http://127.0.0.1:4646"
    autostart: bool = False
    """Start `nomad agent -dev` when the address is this machine's and nothing listens there. It stays."""
    token: str | None = Field(default=None, repr=False)
    """ACL token; None: from `acl_file` or NOMAD_TOKEN. Never written to the journal."""
    acl_file: Path | None = None
    """A file that holds the ACL token, read anew for each request: an agent that renews tokens may write it."""
    namespace: str = "default"
    region: str | None = None
    ca_cert: Path | None = None
    ca_path: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    tls_server_name: str | None = None
    tls_skip_verify: bool = False

    driver: Literal["raw_exec", "docker", "apptainer"] = "raw_exec"
    """How a host is run; `apptainer` is a raw_exec task that enters an image, so its nodes need no Docker."""
    image: str | None = None
    """docker: image of the hosts, unless a spec names its own. apptainer: path of the image on the nodes."""
    python: str = "python3"
    """Interpreter of the slot server on the node or in the image, 3.9 or later."""
    server_path: str | None = None
    """A packed slot server that nodes or image already have; None: the pool sends it to each new host."""
    level: str | None = None
    """Build slots at this isolation level instead of the strongest that works there."""
    user: str | None = None
    """Run the host as this user of the node or image; docker: root, unless another is named."""

    job_prefix: str = Field(default="hermes-rl", pattern=r"^[A-Za-z0-9_-]{1,40}$")
    """Start of every job id. Everything below it belongs to pools of this project."""
    datacenters: Texts = ("*",)
    node_pool: str = "default"
    constraints: Texts = ()
    """Which nodes may be used: `${attr.kernel.name} = linux`, in Nomad's words and separated by spaces."""
    priority: int = Field(default=50, ge=1, le=100)
    cpu_mhz: int = Field(default=500, ge=1)
    memory_mb: int = Field(default=1024, ge=10)
    """What a host asks of the scheduler. docker enforces it; with raw_exec the limits of the slots count."""
    memory_max_mb: int | None = None
    disk_mb: int = Field(default=300, ge=10)
    host_network: str | None = None
    """Name of the nodes' network on which slot servers listen; None: the node's default one."""

    network_mode: str = "host"
    """docker: `host`, or a network of the engine; the slot port is then published."""
    privileged: bool = False
    cap_add: Texts = ()
    """docker: capabilities; with `sys_admin,net_admin` slots are built from namespaces without being privileged."""
    security_opt: Texts = ()
    volumes: Texts = ()
    """docker and apptainer: further bind mounts, `from:to[:ro]`."""
    force_pull: bool = False
    apptainer: str = "apptainer"
    """Name or path of the program on the nodes; `singularity` takes the same arguments."""
    apptainer_args: Texts = ()

    blocked_timeout_s: float = Field(default=15.0, gt=0)
    """How long a host may wait for room on the cluster before its start fails with what is missing."""
    pending_timeout_s: float = Field(default=300.0, gt=0)
    """How long a placed host may take to run; an image may have to be pulled first."""
    ready_timeout_s: float = Field(default=60.0, gt=0)
    """How long a running host may take until its slot server answers."""
    stop_timeout_s: float = Field(default=50.0, gt=0)
    api_timeout_s: float = Field(default=30.0, gt=0)
    """How long one request is repeated while the cluster has no leader or does not answer."""
    relist_s: float = Field(default=30.0, gt=0)
    """How often the whole list is read, in addition to the event stream."""

    @classmethod
    def resolve(cls, options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> NomadOptions:
        """Options, completed by the environment."""
        environ = os.environ if environ is None else environ
        found = {name: environ[variable] for name, variable in VARIABLES.items() if environ.get(variable)}
        return checked_options(cls, {**found, **options})

    def acl_token(self) -> str | None:
        """The token to use now."""
        if self.token is not None:
            return self.token
        if self.acl_file is not None:
            return self.acl_file.read_text().strip()
        return os.environ.get("NOMAD_TOKEN") or None

    def tls(self) -> ssl.SSLContext | None:
        """How to speak to an https address; None for http."""
        if not self.address.startswith("https:"):
            return None
        context = ssl.create_default_context(
            cafile=None if self.ca_cert is None else str(self.ca_cert),
            capath=None if self.ca_path is None else str(self.ca_path),
        )
        if self.tls_skip_verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_cert is not None:
            context.load_cert_chain(self.client_cert, self.client_key)
        return context
