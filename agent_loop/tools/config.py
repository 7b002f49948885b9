"""Limits and settings of the tools of a rollout. The defaults are hermes-agent's."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

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
