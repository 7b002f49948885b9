"""Limits and settings of the tools of a rollout. The defaults are hermes-agent's."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from agent_loop.model.backends.http import http_address
from agent_loop.tools.policy import CommandPolicy


class LocalWebConfig(BaseModel):
    """A small corpus on disk that plays the web: reproducible, offline."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: Literal["local"] = "local"
    corpus: str
    """A JSON Lines file of {"url", "title", "text"}."""


class HttpWebConfig(BaseModel):
    """The real web, as far as the allow-list goes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    provider: Literal["http"] = "http"
    search_url: str
    """Asked as `SEARCH_URL?q=QUERY&format=json`; answers {"results": [{"title", "url", "content"}]} (SearXNG does)."""
    allowed_hosts: tuple[str, ...] = Field(min_length=1)
    """Hosts that pages may be read from: `docs.python.org`, or `*.python.org` for every host below."""
    timeout_s: float = Field(default=20.0, gt=0)
    max_page_bytes: int = Field(default=2_000_000, gt=0)
    max_redirects: int = Field(default=5, ge=0)


WebConfig = LocalWebConfig | HttpWebConfig


class McpServerConfig(BaseModel):
    """One MCP server, by command or by address. Each rollout has its own process or session."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: list[str] = Field(default_factory=list)
    """Program and arguments of a server that speaks over stdin and stdout."""
    where: Literal["slot", "host"] = "slot"
    """Where the command runs: in the rollout's sandbox, or on this machine, out of the agent's reach."""
    url: str = ""
    """Address of a server that speaks HTTP, instead of a command."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables of the command."""
    headers: dict[str, SecretStr] = Field(default_factory=dict)
    """Sent with every request to `url`."""
    prefix: str | None = Field(default=None, pattern=r"^\w*$")
    """Before the names of its tools; None: the server's name here and `_`."""
    tools: list[str] | None = None
    """Names of the tools to offer, as the server calls them; None: all."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Of one call."""
    start_timeout_s: float = Field(default=60.0, gt=0)

    @model_validator(mode="after")
    def _command_or_address(self) -> McpServerConfig:
        if bool(self.command) == bool(self.url):
            raise ValueError("give either `command` or `url`")
        if self.url:
            http_address(self.url, may_have_query=True)
        return self


class ScriptLimits(BaseModel):
    """What one execute_code script may use."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timeout_s: float = Field(default=300.0, gt=0)
    max_calls: int = Field(default=50, ge=0)
    stdout_bytes: int = Field(default=50_000, gt=0)
    """Kept 40 % from the start and 60 % from the end."""
    stderr_bytes: int = Field(default=10_000, gt=0)


class ToolConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    default_timeout_s: int = Field(default=180, gt=0)
    """Of a foreground command, when the model gives none."""
    max_timeout_s: int = Field(default=600, gt=0)
    """A longer timeout is lowered to this, and the result says so."""
    max_output_chars: int = Field(default=50_000, gt=0)
    """Of one command, 40 % from the start and 60 % from the end."""
    max_read_chars: int = Field(default=100_000, gt=0)
    """Of one read_file; the rest is on the next page."""
    max_line_chars: int = Field(default=2_000, gt=0)
    max_file_bytes: int = Field(default=8_000_000, gt=0)
    """Files above this are paged inside the sandbox and cannot be patched."""
    max_processes: int = Field(default=64, gt=0)
    """Background processes running at once."""
    secret_env: tuple[str, ...] = ()
    """Names of variables whose values are hidden in command output, besides those that look secret by name."""
    redact_shapes: bool = False
    """Hide in command output whatever looks like a key, token or private key, not only values that this process knows.
    Off: a task's own test data may look like that."""
    script: ScriptLimits = ScriptLimits()
    policy: CommandPolicy = CommandPolicy()
    web: WebConfig | None = None
    """None: there are no web tools."""
