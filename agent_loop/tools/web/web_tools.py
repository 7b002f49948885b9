"""The web tools and the interface behind them. A provider answers from a corpus on disk or from allowed hosts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from agent_loop.tools.tool import CallContext, Tool, ToolFailure, load_schema

MAX_PAGE_CHARS = 15_000


class WebFault(Exception):
    """A search or a page that cannot be had; the message is for the model."""


@dataclass(frozen=True)
class SearchHit:
    url: str
    title: str
    description: str


@dataclass(frozen=True)
class Page:
    url: str
    title: str
    text: str


class WebProvider(Protocol):
    """Where searches and pages come from. Both calls raise `WebFault` for what the model should read."""

    async def search(self, query: str, limit: int) -> list[SearchHit]:
        """The best results first."""

    async def fetch(self, url: str) -> Page:
        """One page."""

    async def close(self) -> None:
        """Give back connections."""


async def run_search(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """web_search: `{"success", "data": {"web": [{"title", "url", "description", "position"}]}}`."""
    query = arguments["query"].strip()
    if not query:
        raise ToolFailure("query is empty.", success=False)
    try:
        hits = await _provider(ctx).search(query, min(20, max(1, arguments.get("limit") or 5)))
    except WebFault as fault:
        raise ToolFailure(str(fault), success=False) from fault
    rows = [
        {"title": hit.title, "url": hit.url, "description": hit.description, "position": position}
        for position, hit in enumerate(hits, start=1)
    ]
    return {"success": True, "data": {"web": rows}}


async def run_extract(ctx: CallContext, arguments: dict[str, Any]) -> dict[str, Any]:
    """web_extract: `{"results": [{"url", "title", "content", "error"}]}`, in the order asked."""
    provider = _provider(ctx)
    return {"results": list(await asyncio.gather(*(_extract(provider, url) for url in arguments["urls"])))}


async def _extract(provider: WebProvider, url: str) -> dict[str, Any]:
    try:
        page = await provider.fetch(url)
    except WebFault as fault:
        return {"url": url, "title": "", "content": "", "error": str(fault)}
    return {"url": page.url, "title": page.title, "content": _shortened(page.text), "error": None}


def _shortened(text: str) -> str:
    if len(text) <= MAX_PAGE_CHARS:
        return text
    head = MAX_PAGE_CHARS * 3 // 4
    tail = MAX_PAGE_CHARS - head
    left_out = len(text) - MAX_PAGE_CHARS
    return f"{text[:head]}\n\n... [{left_out:,} characters left out] ...\n\n{text[-tail:]}"


def _provider(ctx: CallContext) -> WebProvider:
    if ctx.web is None:
        raise ToolFailure("The web tools are not configured here.")
    return ctx.web


SEARCH_TOOL = Tool(
    schema=load_schema("web_search"),
    toolset="web",
    run=run_search,
    parallel_safe=True,
    script_parameters=("query", "limit"),
)
EXTRACT_TOOL = Tool(
    schema=load_schema("web_extract"),
    toolset="web",
    run=run_extract,
    parallel_safe=True,
    script_parameters=("urls",),
)
