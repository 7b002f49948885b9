"""run-api over HTTP: each endpoint as one call with typed answers and errors that say what may be done next.

`ApiDown`: nothing was taken, the same call may be made again (`ApiGone`: because no process listens there any more;
`ApiBroken`: it answered 5xx). `ApiRefused`: it understood and said no; again would end the same. `Unanswered`: the
body was sent and no answer came, so only a look at the API can tell whether it was taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp

CHUNK_BYTES = 1 << 18
GATEWAY_TIMEOUT = 504
START_POLL_S = 0.1


class ApiError(Exception):
    """run-api could not do what was asked."""


class ApiDown(ApiError):
    """No use of it at the moment: nothing was taken."""


class ApiGone(ApiDown):
    """The connection was refused: the process that held the queue is dead, and its memory with it."""


class ApiBroken(ApiDown):
    """A 5xx: the process lives, and could not do this."""


class ApiRefused(ApiError):
    """A 4xx: the request itself is wrong."""


class Unanswered(ApiError):
    """Sent whole, but the answer never came."""


@dataclass(frozen=True)
class Registration:
    """run-api's answer to an environment."""

    env_id: int
    name: str
    starting_step: int
    checkpoint_dir: str
    checkpoint_interval: int
    num_steps: int


@dataclass(frozen=True)
class EnvStatus:
    """The queue as this environment sees it, in groups of its own size."""

    current_step: int
    queue_size: int
    self_queue_size: int = 0
    unallocated_fraction: float = 1.0
    max_group_size: int = 1
    env_weight: float = 1.0


@dataclass(frozen=True)
class TrainerInfo:
    """What the trainer asked for; -1 where it did not say."""

    batch_size: int
    max_token_len: int


class RolloutApi:
    """One run-api. Short calls share keep-alive connections; groups go over a fresh one each, so that a refused
    connection proves that nothing was taken."""

    def __init__(self, url: str, call_timeout_s: float = 30.0, send_timeout_s: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self._call_timeout = aiohttp.ClientTimeout(total=call_timeout_s)
        self._send_timeout = aiohttp.ClientTimeout(total=send_timeout_s)
        self._calls: aiohttp.ClientSession | None = None
        self._sends: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._calls = aiohttp.ClientSession(timeout=self._call_timeout)
        self._sends = aiohttp.ClientSession(
            timeout=self._send_timeout, connector=aiohttp.TCPConnector(force_close=True)
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        for session in (self._calls, self._sends):
            if session is not None:
                await session.close()

    async def register_env(self, request: Mapping[str, Any]) -> Registration | None:
        """Register; None while the trainer has not started."""
        answer = await self._call("POST", "/register-env", dict(request))
        if answer.get("status") != "success":
            return None
        return Registration(
            env_id=answer["env_id"],
            name=answer["wandb_name"],
            starting_step=answer["starting_step"],
            checkpoint_dir=answer["checkpoint_dir"],
            checkpoint_interval=answer["checkpoint_interval"],
            num_steps=answer["num_steps"],
        )

    async def disconnect_env(self, env_id: int) -> None:
        """Tell run-api not to wait for this environment any more."""
        await self._call("POST", "/disconnect-env", {"env_id": env_id})

    async def env_status(self, env_id: int) -> EnvStatus:
        """Step and queue; a 500 means that this run-api does not know us."""
        answer = await self._call("GET", "/status-env", {"env_id": env_id})
        known = EnvStatus.__dataclass_fields__
        return EnvStatus(**{key: value for key, value in answer.items() if key in known})

    async def trainer_info(self) -> TrainerInfo:
        """Batch size and length limit of the trainer."""
        answer = await self._call("GET", "/info")
        return TrainerInfo(answer["batch_size"], answer["max_token_len"])

    async def wandb_info(self) -> tuple[str | None, str | None]:
        """(group, project) that the trainer logs under."""
        answer = await self._call("GET", "/wandb_info")
        return answer.get("group"), answer.get("project")

    async def latest_group_id(self) -> str | None:
        """`generation_params.group_id` of the group that run-api took last, from whichever environment."""
        params = (await self._call("GET", "/latest_example")).get("generation_params")
        return params.get("group_id") if isinstance(params, dict) else None

    async def send_group(self, body: bytes) -> str:
        """POST one encoded group; "received" or "buffered". Raises ApiDown, ApiRefused or Unanswered."""
        if self._sends is None:
            raise RuntimeError("RolloutApi is used inside `async with`")
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        try:
            async with self._sends.post(f"{self.url}/scored_data", data=_chunks(body), headers=headers) as response:
                return str((await self._answer(response, "/scored_data")).get("status"))
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(self.url, error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Unanswered(f"{self.url}/scored_data gave no answer: {error!r}") from error

    async def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        if self._calls is None:
            raise RuntimeError("RolloutApi is used inside `async with`")
        try:
            async with self._calls.request(method, self.url + path, json=body) as response:
                return await self._answer(response, path)
        except aiohttp.ClientConnectorError as error:
            raise _unreachable(self.url, error) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiDown(f"{self.url}{path} gave no answer: {error!r}") from error

    async def _answer(self, response: aiohttp.ClientResponse, path: str) -> dict[str, Any]:
        if response.status == GATEWAY_TIMEOUT:
            raise Unanswered(f"{path} answered 504")
        if response.status >= 400:
            text = (await response.text())[:300]
            kind = ApiRefused if response.status < 500 else ApiBroken
            raise kind(f"{path} answered {response.status}: {text}")
        answer = await response.json()
        if not isinstance(answer, dict):
            raise ApiDown(f"{path} answered {type(answer).__name__}, not an object")
        return answer


async def until_up(url: str, timeout_s: float = 60.0) -> None:
    """Wait for a run-api that was just started; TimeoutError when it does not come up."""
    async with asyncio.timeout(timeout_s), RolloutApi(url) as api:
        while True:
            try:
                await api.trainer_info()
            except ApiDown:
                await asyncio.sleep(START_POLL_S)  # it has no way to tell
            else:
                return


def _unreachable(url: str, error: aiohttp.ClientConnectorError) -> ApiDown:
    kind = ApiGone if isinstance(error.os_error, ConnectionRefusedError) else ApiDown
    return kind(f"{url} is not reachable: {error}")


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for start in range(0, len(body), CHUNK_BYTES):
        yield bytes(view[start : start + CHUNK_BYTES])
