"""Our registration with run-api, kept alive: when run-api was replaced, we register with the new one.

How a new run-api is told from a busy one: a refused connection means that the process with the queue is dead, and a 5xx
from /status-env means that this process does not know us. A slow answer or a dropped connection means neither. For this
the environment must reach run-api directly, not through a proxy that stays up by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

from environments.atropos.api import ApiBroken, ApiDown, ApiGone, EnvStatus, Registration, RolloutApi
from environments.atropos.stops import Stop

log = logging.getLogger(__name__)


class ApiLost(Exception):
    """run-api stayed away longer than we were told to wait."""


class Stopped(Exception):
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

    @property
    def registered(self) -> bool:
        """Whether `register` has succeeded at least once."""
        return self._registration is not None

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
            log.warning("could not say goodbye to run-api: %s", error)

    async def _register_again(self) -> None:
        log.warning("run-api at %s was replaced: registering again; what its queue held is gone", self.api.url)
        await self.register()

    async def _pause(self) -> None:
        if self._stop.now.is_set():
            raise Stopped("stopped while waiting for run-api")
        try:
            await asyncio.wait_for(self._stop.now.wait(), self._poll_s)
        except TimeoutError:
            return
        raise Stopped("stopped while waiting for run-api")


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
