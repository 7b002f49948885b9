"""JSON to one inference server and back, over aiohttp; what all backends share."""

from __future__ import annotations

import asyncio
import math
import ssl
from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from io import BytesIO
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
import orjson
from yarl import URL

from agent_loop.model.contract import ModelRefused, ModelUnavailable
from agent_loop.model.errors import failure, failure_in

CONNECTIONS = 1024
"""Open at once to one server; more requests wait in line."""
CONNECT_WITHIN_S = 30.0
KEEP_IDLE_S = 15.0
"""Routers forget idle connections without a word, so an older one is not trusted with a request."""
READ_AT_ONCE = 1 << 20
"""Bytes of an answer that may wait to be read, and of a request that are written in one piece."""
FEWEST_TOKENS = 5
"""Fewer say nothing of an entropy; servers give one or two without being asked."""


class JsonClient:
    """A client for one server. It connects on first use, inside the running event loop.

    HTTP_PROXY, HTTPS_PROXY and NO_PROXY are read when it is made. Servers on this machine are never asked through a
    proxy: those that we start ourselves could not be reached by one.
    """

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0, ca_file: Path | str | None = None
    ) -> None:
        """`ca_file`: certificates (PEM) of a private authority; without it those of the system or SSL_CERT_FILE."""
        address = http_address(url.rstrip("/").removesuffix("/v1"))
        self.url = address._replace(netloc=address.netloc.rpartition("@")[2]).geturl()
        self._headers = {
            "User-Agent": "hermes-rl",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            "Content-Type": "application/json",
        }
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        elif address.username is not None:
            said = f"{unquote(address.username)}:{unquote(address.password or '')}"
            self._headers["Authorization"] = f"Basic {b64encode(said.encode()).decode()}"
        if any(not text.isprintable() for text in (self.url, *self._headers.values())):
            raise ValueError("the API key or the address has characters that no HTTP header can hold")
        self._proxy = proxy_for(address)
        self._tls = ssl.create_default_context(cafile=ca_file) if address.scheme == "https" else None
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_WITHIN_S)
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._addresses: dict[str, URL] = {}

    async def post(self, path: str, body: Any, *, echo: Echo | None = None) -> Any:
        """Send JSON, get JSON; what an `echo` says is compared and left out."""
        data = orjson.dumps(body, option=orjson.OPT_NON_STR_KEYS)
        payload = await self._request("POST", path, data)
        return self._read(path, payload if echo is None else echo.checked(payload))

    async def get(self, path: str) -> Any:
        """Get JSON."""
        return self._read(path, await self._request("GET", path))

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        session, self._session = self._session, None
        if session is not None and self._loop is asyncio.get_running_loop():
            await session.close()

    async def _request(self, method: str, path: str, data: bytes = b"") -> bytes:
        where = f"{self.url}{path}"
        address = self._addresses.get(path) or self._addresses.setdefault(path, URL(where))
        try:
            try:
                response, payload = await self._exchange(method, address, data)
            except aiohttp.ClientOSError as error:
                if not isinstance(error.__cause__, ConnectionError):
                    raise
                # The server closed a kept connection while the request was being written: it cannot have acted on it.
                response, payload = await self._exchange(method, address, data)
        except TimeoutError as error:
            raise ModelUnavailable(f"{where}: no answer in time") from error
        except aiohttp.ClientConnectorCertificateError as error:
            raise ModelRefused(f"{where}: {error}: name its authority in ca_file or SSL_CERT_FILE") from error
        except (aiohttp.TooManyRedirects, aiohttp.InvalidURL) as error:
            raise ModelRefused(f"{where}: redirected to nowhere: {str(error) or type(error).__name__}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise ModelUnavailable(f"{where}: {str(error) or type(error).__name__}") from error
        if response.status >= 300:
            moved = f" (redirected to {response.url}: give that address instead)" if response.history else ""
            text = payload[:READ_AT_ONCE].decode("utf-8", "replace")
            raise failure(response.status, text, response.headers, where=where + moved)
        return payload

    async def _exchange(self, method: str, address: URL, data: bytes) -> tuple[aiohttp.ClientResponse, bytes]:
        body = BytesIO(data) if len(data) > READ_AT_ONCE else data or None
        async with self._connected().request(method, address, data=body) as response:
            return response, await response.read()

    def _connected(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            if self._session is not None:
                self._session.detach()  # its event loop has ended, and its connections with it
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=CONNECTIONS, keepalive_timeout=KEEP_IDLE_S, ssl=self._tls if self._tls is not None else True
                ),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                proxy=self._proxy,
                timeout=self._timeout,
                read_bufsize=READ_AT_ONCE,
            )
        return self._session

    def _read(self, path: str, payload: bytes) -> Any:
        try:
            answer = orjson.loads(payload)
        except orjson.JSONDecodeError as error:
            raise ModelRefused(f"{self.url}{path}: the answer is not JSON: {payload[:200]!r}") from error
        if isinstance(answer, dict) and (fault := answer.get("error")):
            raise failure_in(fault, where=f"{self.url}{path}")
        return answer


def http_address(url: str, *, may_have_query: bool = False) -> SplitResult:
    """The parts of a server's address; raises ValueError when it is not one."""
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname or (address.query and not may_have_query):
        raise ValueError(f"{url!r} is not an address like http://127.0.0.1:8000")
    return address


def proxy_for(address: SplitResult) -> str | None:
    """The proxy that the environment names for an address.

    aiohttp's `trust_env` would read the environment, and a .netrc, in a thread before every request.
    """
    host = str(address.hostname)
    if is_loopback(host) or proxy_bypass(host):
        return None
    return getproxies().get(address.scheme)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


class HttpBackend:
    """What the backends share: the client, and the context length as OpenAI-compatible servers tell it."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        ca_file: Path | str | None = None,
    ) -> None:
        """`model` is one of the names in the server's /v1/models; None takes the first."""
        self._http = JsonClient(url, api_key=api_key, timeout_s=timeout_s, ca_file=ca_file)
        self._model = model

    async def context_tokens(self) -> int | None:
        """Tokens that prompt and answer may have together; None when the server does not tell."""
        try:
            cards = field(await self._http.get("/v1/models"), "data")
        except ModelRefused:
            return None
        named = [card for card in cards if card.get("id") == self._model]
        lengths = [card.get("max_model_len") for card in (*named, *cards)]
        return next((length for length in lengths if isinstance(length, int)), None)

    async def close(self) -> None:
        """Drop the connections."""
        await self._http.close()


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


def entropies(rows: Iterable[Iterable[float]]) -> list[float | None]:
    """From the logprobs of the likeliest tokens at each place, in nats; what is left over counts as one token more.

    So each is at most the true one, and the more tokens are asked for, the nearer.
    """
    found = [_entropy(list(row)) for row in rows]
    return found if any(value is not None for value in found) else []


def _entropy(logprobs: list[float]) -> float | None:
    if len(logprobs) < FEWEST_TOKENS:
        return None
    left = 1.0 - sum(map(math.exp, logprobs))
    return -sum(math.exp(p) * p for p in logprobs) - (left * math.log(left) if left > 0 else 0.0)


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
