"""JSON to one server and back, with transport faults told apart from refusals."""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

import orjson

from agent_loop.model.backends.connections import Connections, http_address
from agent_loop.model.contract import ContextTooLong, ModelRefused, ModelUnavailable

RETRYABLE = frozenset({408, 425, 429})
"""4xx codes that say "later", not "no"."""
_CONTEXT = re.compile(
    r"exceed_context_size|context (length|size|window)|maximum (context|input|model) (length|len)|max_model_len"
    r"|longer than the model|too many tokens|input is too long",
    re.IGNORECASE,
)


class JsonClient:
    """A client for one server. It connects on first use, inside the running event loop."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        address = http_address(url.rstrip("/").removesuffix("/v1"))
        host = address.netloc.rpartition("@")[2]
        self.url = address._replace(netloc=host).geturl()
        self._connections = Connections(address)
        self._timeout_s = timeout_s
        self._path = quote(address.path, safe="/%:@!$&'()*+,;=~")
        headers = [f"Host: {host}", "User-Agent: hermes-rl", "Accept: application/json"]
        if api_key:
            headers.append(f"Authorization: Bearer {api_key}")
        elif address.username is not None:
            said = f"{unquote(address.username)}:{unquote(address.password or '')}"
            headers.append(f"Authorization: Basic {b64encode(said.encode()).decode()}")
        if any(not header.isprintable() for header in headers):
            raise ValueError("the API key or the address has characters that no HTTP header can hold")
        self._headers = "\r\n".join(headers)

    async def post(self, path: str, body: Any, *, echo: Echo | None = None) -> Any:
        """Send JSON, get JSON; what an `echo` says is compared and left out."""
        data = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
        about = f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        payload = await self._request("POST", path, about, data)
        return self._read(path, payload if echo is None else echo.checked(payload))

    async def get(self, path: str) -> Any:
        """Get JSON."""
        return self._read(path, await self._request("GET", path, "\r\n", b""))

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        self._connections.close()

    async def _request(self, method: str, path: str, about: str, data: bytes) -> bytes:
        where = f"{self.url}{path}"
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}\r\n{about}"
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._connections.ask(head.encode() + data)
        except TimeoutError as error:
            raise ModelUnavailable(f"{where}: no answer in time") from error
        except OSError as error:
            raise ModelUnavailable(f"{where}: {error or type(error).__name__}") from error
        if answer.status >= 400:
            raise _failure(where, answer.status, answer.body)
        if answer.status >= 300:
            raise ModelRefused(f"{where}: HTTP {answer.status} to {answer.location}: give that address instead")
        return answer.body

    def _read(self, path: str, payload: bytes) -> Any:
        try:
            return orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise ModelRefused(f"{self.url}{path}: the answer is not JSON: {payload[:200]!r}") from error


@dataclass(frozen=True)
class Echo:
    """The ids of a prompt as JSON, which the server repeats in its answer under some key.

    They are long, and reading them would take most of the time of reading the answer. As text they are compared at
    once: that the server saw exactly what was sent is then known, and nothing is left to read.
    """

    key: str
    ids: bytes

    def checked(self, payload: bytes) -> bytes:
        """The answer without the echo; raises ModelRefused when the server saw other ids.

        No string holds `"key":[` as it stands here, because its quotes would be escaped: it is always the key.
        """
        begin = payload.find(b'"%b":[' % self.key.encode())
        end = payload.find(b"]", begin) + 1
        if begin < 0 or end == 0:
            return payload
        begin += len(self.key) + 3
        if payload[begin:end].replace(b" ", b"") != self.ids:
            raise ModelRefused(f"the server's {self.key} are not the ids that were sent")
        return payload[:begin] + b"null" + payload[end:]


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
