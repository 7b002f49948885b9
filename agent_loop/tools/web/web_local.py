"""A web of one file: BM25 over a small corpus. The same query always gives the same answer, on every machine."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from agent_loop.tools.web.web_tools import Page, SearchHit, WebFault

_K1, _B = 1.2, 0.75
_TITLE_WEIGHT = 3
_SNIPPET_CHARS = 200


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class LocalWeb:
    """Answers from a corpus in memory; read-only, so rollouts may share one."""

    def __init__(self, pages: Iterable[Page]) -> None:
        self._pages = {page.url: page for page in pages}
        self._counts = {url: _weighted(page) for url, page in self._pages.items()}
        self._lengths = {url: sum(counts.values()) for url, counts in self._counts.items()}
        self._mean = sum(self._lengths.values()) / len(self._lengths) if self._lengths else 1.0
        self._spread = Counter(word for counts in self._counts.values() for word in counts)

    @classmethod
    def from_file(cls, path: str | Path) -> LocalWeb:
        """Read a JSON Lines corpus; a file read before and unchanged is not read again."""
        place = Path(path)
        return _read(str(place.resolve()), place.stat().st_mtime_ns)

    async def search(self, query: str, limit: int) -> list[SearchHit]:
        """Pages by BM25 score; pages without any word of the query are left out."""
        words = _words(query)
        scored = [(self._score(url, words), url) for url in self._pages]
        best = sorted((-score, url) for score, url in scored if score > 0)[:limit]
        return [self._hit(url, words) for _, url in best]

    async def fetch(self, url: str) -> Page:
        page = self._pages.get(url) or self._pages.get(url.rstrip("/")) or self._pages.get(url.split("#")[0])
        if page is None:
            raise WebFault(f"{url} cannot be reached.")
        return page

    async def close(self) -> None:
        """Nothing to give back."""

    def _score(self, url: str, words: Iterable[str]) -> float:
        counts, total = self._counts[url], 0.0
        for word in words:
            if (count := counts.get(word, 0)) == 0:
                continue
            rarity = math.log(1 + (len(self._pages) - self._spread[word] + 0.5) / (self._spread[word] + 0.5))
            total += rarity * count * (_K1 + 1) / (count + _K1 * (1 - _B + _B * self._lengths[url] / self._mean))
        return total

    def _hit(self, url: str, words: list[str]) -> SearchHit:
        page = self._pages[url]
        lowered = page.text.lower()
        found = [at for word in words if (at := lowered.find(word)) >= 0]
        start = max(0, min(found, default=0) - _SNIPPET_CHARS // 4)
        return SearchHit(url, page.title, " ".join(page.text[start : start + _SNIPPET_CHARS].split()))


def _weighted(page: Page) -> Mapping[str, int]:
    counts = Counter(_words(page.text))
    for word in _words(page.title):
        counts[word] += _TITLE_WEIGHT
    return counts


@lru_cache(maxsize=8)
def _read(path: str, _changed_ns: int) -> LocalWeb:
    pages = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), start=1):
        if line.strip():
            pages.append(_page(line, f"{path}:{number}"))
    return LocalWeb(pages)


def _page(line: str, where: str) -> Page:
    try:
        row: Any = json.loads(line)
        return Page(str(row["url"]), str(row.get("title", "")), str(row["text"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{where}: expected {{"url", "title", "text"}} as JSON, got: {error!r}') from error
