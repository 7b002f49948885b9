"""The real web behind an allow-list. Every address, and every hop of a redirect, is checked before it is asked.

Requests leave from the training process, not from the sandbox: that is why nothing outside the list is ever reached.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from html import unescape
from types import TracebackType
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp

from agent_loop.tools.config import HttpWebConfig
from agent_loop.tools.web.web_tools import Page, SearchHit, WebFault

_SKIPPED = frozenset(("script", "style", "noscript", "template", "svg", "head"))
_BLOCKS = frozenset(
    (
        "p",
        "div",
        "section",
        "article",
        "header",
        "footer",
        "main",
        "nav",
        "ul",
        "ol",
        "table",
        "tr",
        "pre",
        "blockquote",
    )
)
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}


_NAME = re.compile(r"(/?)([a-zA-Z][^\s/>]*)")
_REST = re.compile(r"""(?:[^>"'=]|=\s*(?:"[^"]*"|'[^']*')?|["'])*+>""")
"""Of a tag, behind its name: `>` may be in a quoted value."""
_RAW = {name: re.compile(f"</{name}", re.IGNORECASE) for name in ("script", "style")}


class _Text:
    """Reads as browsers do, in one pass: html.parser takes minutes for some pages of 100 kB."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.title: list[str] = []
        self._in_title = False
        self._skipping = 0

    def feed(self, page: str) -> None:
        at = 0
        while (start := page.find("<", at)) >= 0:
            self.handle_data(page[at:start])
            at = self._markup(page, start)
        self.handle_data(page[at:])

    def _markup(self, page: str, start: int) -> int:
        """What begins with a `<`; where it ends. Whatever has no end takes the rest of the page."""
        if page.startswith(("<!", "<?"), start):
            end = "-->" if page.startswith("<!--", start) else ">"
            found = page.find(end, start + 2)
            return found + len(end) if found >= 0 else len(page)
        name = _NAME.match(page, start + 1)
        if name is None:
            self.handle_data("<")
            return start + 1
        rest = _REST.match(page, name.end())
        if rest is None:
            return len(page)
        closing, tag = name.group(1), name.group(2).lower()
        at = rest.end()
        if closing:
            self.handle_endtag(tag)
            return at
        self.handle_starttag(tag)
        if page[at - 2] == "/":
            self.handle_endtag(tag)
        elif tag in _RAW:
            ending = _RAW[tag].search(page, at)
            return ending.start() if ending else len(page)
        return at

    def handle_starttag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = True
        elif tag in _SKIPPED:
            self._skipping += 1
        elif tag in _HEADINGS:
            self.parts.append(f"\n\n{_HEADINGS[tag]}")
        elif tag == "li":
            self.parts.append("\n- ")
        elif tag == "br":
            self.parts.append("\n")
        elif tag in ("td", "th"):
            self.parts.append(" | ")
        elif tag in _BLOCKS:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        elif tag in _SKIPPED:
            self._skipping = max(0, self._skipping - 1)
        elif tag in _BLOCKS or tag in _HEADINGS:
            self.parts.append("\n\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(unescape(data))
        elif not self._skipping:
            self.parts.append(re.sub(r"\s+", " ", unescape(data)))


def html_to_text(html: str) -> tuple[str, str]:
    """Title and text of a page. Never raises: broken HTML gives what can be read of it."""
    parser = _Text()
    parser.feed(html)
    text = "\n".join(line.strip(" \t") for line in "".join(parser.parts).split("\n"))
    return " ".join("".join(parser.title).split()), re.sub(r"\n{3,}", "\n\n", text).strip()


_DECLARED = re.compile(
    rb"""<(?:meta|\?xml)\b[^>]{0,300}?(?:charset|encoding)\s*=\s*["']?([\w.:-]{1,40})""", re.IGNORECASE
)


_NOT_OF_PAGES = frozenset({"idna", "punycode", "raw-unicode-escape", "unicode-escape", "utf-7"})
"""Encodings of Python that no browser has; punycode takes time that grows with the square of the length."""


def decode_page(data: bytes, charset: str | None, *, cut_off: bool = False) -> str:
    """Text of a page: by its byte order mark, its header, what it says itself, UTF-8, or else as browsers read it."""
    if data.startswith(codecs.BOM_UTF8):
        return data[3:].decode("utf-8", "replace")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", "replace")
    declared = _DECLARED.search(data[:1024])
    for name in (charset, declared.group(1).decode("ascii") if declared else None):
        try:
            if name and codecs.lookup(name).name not in _NOT_OF_PAGES:
                return data.decode(name, "replace")
        except (LookupError, ValueError):
            continue  # there is no such encoding
    try:
        return codecs.utf_8_decode(data, "strict", not cut_off)[0]
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace")


_REDIRECTS = frozenset((301, 302, 303, 307, 308))


class HttpWeb:
    """Searches one engine and reads pages of allowed hosts. Opens its connections at the first call."""

    def __init__(self, config: HttpWebConfig) -> None:
        self._config = config
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> HttpWeb:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def search(self, query: str, limit: int) -> list[SearchHit]:
        try:
            async with self._open().get(self._config.search_url, params={"q": query, "format": "json"}) as answer:
                if answer.status != 200:
                    raise WebFault(f"The search engine answered {answer.status}.")
                data: Any = await answer.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise WebFault(f"The search failed: {_said(error)}") from error
        rows = data.get("results") if isinstance(data, dict) else None
        if not isinstance(rows, list):
            raise WebFault("The search engine's answer has no results list.")
        hits = [_hit(row) for row in rows if isinstance(row, dict) and row.get("url")]
        return hits[:limit]

    async def fetch(self, url: str) -> Page:
        try:
            return await self._follow(url)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise WebFault(f"{url} cannot be read: {_said(error)}") from error

    async def _follow(self, url: str) -> Page:
        for _ in range(self._config.max_redirects + 1):
            self._check(url)
            async with self._open().get(url, allow_redirects=False) as answer:
                if answer.status in _REDIRECTS and (target := answer.headers.get("Location")):
                    url = urljoin(url, target)
                    continue
                if answer.status != 200:
                    raise WebFault(f"{url} answered {answer.status}.")
                return await self._read(url, answer)
        raise WebFault(f"{url} redirects too often.")

    async def _read(self, url: str, answer: aiohttp.ClientResponse) -> Page:
        kind = answer.content_type
        if not kind.startswith("text/") and kind not in ("application/json", "application/xhtml+xml"):
            raise WebFault(f"{url} is {kind}, not text.")
        data = await answer.content.read(self._config.max_page_bytes)
        while len(data) < self._config.max_page_bytes and (more := await answer.content.readany()):
            data += more
        most = self._config.max_page_bytes
        text = decode_page(data[:most], answer.charset, cut_off=len(data) >= most)
        if "html" not in kind:
            return Page(url, "", text)
        title, body = await asyncio.to_thread(html_to_text, text)
        return Page(url, title, body)

    def _check(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise WebFault(f"{url} is not an http or https address.")
        if not any(_matches(parts.hostname, allowed) for allowed in self._config.allowed_hosts):
            raise WebFault(f"{parts.hostname} is not on the list of allowed hosts.")

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
            self._session = aiohttp.ClientSession(timeout=timeout, headers={"User-Agent": "hermes-rl"})
        return self._session


def _matches(host: str, allowed: str) -> bool:
    host, allowed = host.lower().rstrip("."), allowed.lower()
    return host == allowed or (allowed.startswith("*.") and host.endswith(allowed[1:]))


def _hit(row: dict[str, Any]) -> SearchHit:
    return SearchHit(
        str(row["url"]), str(row.get("title") or ""), " ".join(str(row.get("content") or "").split())[:500]
    )


def _said(error: Exception) -> str:
    return "it took too long" if isinstance(error, TimeoutError) else (str(error) or type(error).__name__)
