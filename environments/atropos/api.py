"""run-api: each endpoint as one call with typed answers and errors, and our registration with it, kept alive.

The errors say what may be done next. `ApiDown`: nothing was taken, the same call may be made again (`ApiGone`: because
no process listens there any more; `ApiBroken`: it answered 5xx). `ApiRefused`: it understood and said no; again would
end the same. `Unanswered`: the body was sent and no answer came, so only a look at the API can tell whether it was
taken.

`ApiLink` registers again when run-api was replaced. A refused connection means that the process with the queue is dead,
and a 5xx from /status-env means that this process does not know us. A slow answer or a dropped connection means
neither. For this the environment must reach run-api directly, not through a proxy that stays up by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import aiohttp
from yarl import URL

from environments.atropos.stops import Stop
from environments.errors import RunFailed

log = logging.getLogger(__name__)

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

    @property
    def on_this_machine(self) -> bool:
        """Whether bytes on the way cost nothing."""
        host = URL(self.url).host or ""
        return host == "localhost" or host == "::1" or host.startswith("127.")

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
        headers = {"Content-Type": "application/json"}
        if not body.startswith(b"{"):
            headers["Content-Encoding"] = "gzip"
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


class ApiLost(RunFailed):
    """run-api stayed away longer than we were told to wait."""


class StoppedWaiting(Exception):
    """A stop was asked for while waiting for run-api."""


class ApiLink:
    """The environment's standing with run-api. `epoch` counts registrations: a new one means a new, empty queue."""

    def __init__(
        self, api: RolloutApi, request: Mapping[str, Any], stop: Stop, wait_s: float = 600.0, poll_s: float = 0.25
    ) -> None:
        self.api = api
        self.epoch = 0
        self._request = request
        self._registration: Registration | None = None
        self._stop = stop
        self._wait_s = wait_s
        self._poll_s = poll_s
        self._lock = asyncio.Lock()

    @property
    def registration(self) -> Registration:
        """The current registration; `register` comes first."""
        if self._registration is None:
            raise RuntimeError("not registered with run-api yet")
        return self._registration

    async def register(self) -> Registration:
        """Wait for run-api and for its trainer, then register. ApiLost after `wait_s` without run-api; a trainer may
        take as long as it likes."""
        patience = _Patience(self._wait_s, self.api.url)
        said = False
        while True:
            try:
                registration = await self.api.register_env(self._request)
            except ApiDown as error:
                patience.spend(error)
            else:
                if registration is not None:
                    self._registration = registration
                    self.epoch += 1
                    log.info("registered with %s as %s (env %d)", self.api.url, registration.name, registration.env_id)
                    return registration
                patience.renew()
                if not said:
                    log.info("run-api is up; waiting for the trainer's first GET /batch")
                    said = True
            await self._pause()

    async def status(self) -> EnvStatus:
        """Step and queue, however long that takes within `wait_s`; registers again with a new run-api."""
        async with self._lock:
            patience = _Patience(self._wait_s, self.api.url)
            replaced = False
            while True:
                try:
                    status = await self.api.env_status(self.registration.env_id)
                    if not replaced:
                        return status
                    await self._register_again()
                    replaced = False
                    continue
                except ApiGone as error:
                    replaced = True
                    patience.spend(error)
                except ApiBroken:
                    await self._register_again()
                    replaced = False
                except ApiDown as error:
                    patience.spend(error)
                await self._pause()

    async def disconnect(self) -> None:
        """Leave: run-api stops waiting for our share of a batch. Never raises for an API that is gone already."""
        if self._registration is None:
            return
        try:
            await self.api.disconnect_env(self._registration.env_id)
        except ApiDown as error:
            log.warning("could not leave run-api: %s", error)

    async def _register_again(self) -> None:
        log.warning("run-api at %s was replaced: registering again; what its queue held is gone", self.api.url)
        await self.register()

    async def _pause(self) -> None:
        if self._stop.now.is_set():
            raise StoppedWaiting("stopped while waiting for run-api")
        try:
            await asyncio.wait_for(self._stop.now.wait(), self._poll_s)
        except TimeoutError:
            return
        raise StoppedWaiting("stopped while waiting for run-api")


class _Patience:
    """Counts the time without an answer; speaks once at the start."""

    def __init__(self, wait_s: float, url: str) -> None:
        self._wait_s = wait_s
        self._url = url
        self._since: float | None = None

    def spend(self, error: ApiDown) -> None:
        now = time.monotonic()
        if self._since is None:
            self._since = now
            log.warning("waiting for run-api (up to %.0f s): %s", self._wait_s, error)
        elif now - self._since > self._wait_s:
            raise ApiLost(f"run-api at {self._url} did not come back within {self._wait_s:.0f} s: {error}") from error

    def renew(self) -> None:
        self._since = None
