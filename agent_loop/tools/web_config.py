"""Where the web tools look. Without one of these there are no web tools."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


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
