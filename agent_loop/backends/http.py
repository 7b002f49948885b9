"""JSON over one keep-alive session, with transport faults told apart from refusals."""

from __future__ import annotations

import re
from typing import Any

import aiohttp
import orjson

from agent_loop.model import ContextTooLong, ModelRefused, ModelUnavailable

CONNECTIONS = 1024
RETRYABLE = frozenset({408, 425, 429})
"""4xx codes that say "later", not "no"."""
_CONTEXT = re.compile(
    r"exceed_context_size|context (length|size|window)|maximum (context|input|model) (length|len)|max_model_len"
    r"|longer than the model|too many tokens|input is too long",
    re.IGNORECASE,
)


class JsonClient:
    """A client for one server. The session is made on first use, inside the running event loop."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=30.0)
        self._session: aiohttp.ClientSession | None = None

    async def post(self, path: str, body: Any) -> Any:
        """Send JSON, get JSON."""
        return await self._request("POST", path, orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS))

    async def get(self, path: str) -> Any:
        """Get JSON."""
        return await self._request("GET", path, None)

    async def close(self) -> None:
        """Close the session; a later call opens a new one."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _request(self, method: str, path: str, data: bytes | None) -> Any:
        try:
            async with self._open().request(method, self.url + path, data=data) as response:
                payload = await response.read()
                status = response.status
        except TimeoutError as error:
            raise ModelUnavailable(f"{self.url}{path}: no answer in time") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ModelUnavailable(f"{self.url}{path}: {error or type(error).__name__}") from error
        if status >= 400:
            raise _failure(f"{self.url}{path}", status, payload)
        try:
            return orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise ModelRefused(f"{self.url}{path}: the answer is not JSON: {payload[:200]!r}") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            # Without cookies: a balancer's sticky one would pin every rollout to the replica that answered first.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS),
                headers=self._headers,
                timeout=self._timeout,
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _failure(where: str, status: int, payload: bytes) -> ModelUnavailable | ModelRefused:
    text = payload[:2000].decode("utf-8", "replace")
    message = f"{where}: HTTP {status}: {text[:500]}"
    if status in RETRYABLE or (status >= 500 and not _CONTEXT.search(text)):
        return ModelUnavailable(message)
    return ContextTooLong(message) if _CONTEXT.search(text) else ModelRefused(message)


def field(answer: Any, *path: str | int) -> Any:
    """A value deep inside an answer; an answer without it is a refusal, not a crash."""
    value = answer
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError) as error:
            where = ".".join(map(str, path))
            raise ModelRefused(f"the server's answer has no {where}: {str(answer)[:200]}") from error
    return value
