"""Watches hosts. An unhealthy host gets no new leases; the leases it holds stay until it is clearly gone."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sandbox_pool.config import PoolConfig
from sandbox_pool.errors import SandboxError
from sandbox_pool.pool.host import PooledHost

if TYPE_CHECKING:
    from sandbox_pool.client.host_client import HostHealth

log = logging.getLogger(__name__)

EXPIRY_MARGIN_S = 60.0
"""A host with an end of life gets no new leases from the longest lease plus this before it, or from earlier on when
its provider says so."""


class HealthWatch:
    """One loop per host, ended by cancelling it."""

    def __init__(
        self, config: PoolConfig, *, on_change: Callable[[], None], on_lost: Callable[[PooledHost, str], None]
    ) -> None:
        self._config = config
        self._on_change = on_change
        self._on_lost = on_lost

    async def watch(self, host: PooledHost) -> None:
        """Check now and then at every interval, until cancelled or the host is lost."""
        pending: set[asyncio.Task[HostHealth]] = set()
        try:
            await self._watch(host, pending)
        finally:
            for task in pending:
                task.cancel()

    async def _watch(self, host: PooledHost, pending: set[asyncio.Task[HostHealth]]) -> None:
        answered_s = time.monotonic()
        while True:
            before = host.serves
            await self._check(host, pending)
            if not host.health_failures:
                answered_s = time.monotonic()
            elif time.monotonic() - answered_s > self._config.lost_after_s:
                self._on_lost(host, f"no answer to health checks for {self._config.lost_after_s:g} s")
                return
            if before != host.serves or host.unhealthy:
                self._on_change()
            await asyncio.sleep(self._config.health_interval_s)

    async def _check(self, host: PooledHost, pending: set[asyncio.Task[HostHealth]]) -> None:
        try:
            host.health = await self._ask(host, pending)
        except (TimeoutError, SandboxError, OSError) as error:
            host.health_failures += 1
            reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            log.info("health check of %s failed (%d in a row): %s", host.name, host.health_failures, reason)
            if host.health_failures >= self._config.health_failures:
                host.unhealthy = f"{host.health_failures} health checks failed, the last: {reason}"
            return
        host.health_failures = 0
        host.unhealthy = self._scratch_problem(host)
        if self.expires_soon(host) and host.state == "ready":
            log.info("%s is near its end of life: it gets no more leases", host.name)
            host.state = "draining"

    async def _ask(self, host: PooledHost, pending: set[asyncio.Task[HostHealth]]) -> HostHealth:
        """The answer in time. A request without an answer stays open, because the answer may only be late."""
        assert host.client is not None
        if not pending:
            pending.add(asyncio.get_running_loop().create_task(host.client.health()))
        (task,) = pending
        await asyncio.wait({task}, timeout=self._config.health_timeout_s)
        if not task.done():
            raise TimeoutError
        pending.clear()
        return task.result()

    def _scratch_problem(self, host: PooledHost) -> str:
        """Warn before the scratch space is full; the reason to lease nothing more when it is.

        Said once, and again each time that half of what was left then is gone: not with every check.
        """
        assert host.health is not None
        free_mb, config = host.health.scratch_free_mb, self._config
        host.scratch_full = free_mb < config.scratch_min_mb
        if host.scratch_full:
            return f"scratch space is full: {free_mb} MB free, {config.scratch_min_mb} MB are kept"
        if free_mb >= config.scratch_warn_mb:
            host.scratch_warned_mb = None
        elif host.scratch_warned_mb is None or free_mb < host.scratch_warned_mb / 2:
            host.scratch_warned_mb = free_mb
            log.warning("scratch space of %s is filling up: %d MB free", host.name, free_mb)
        return ""

    def expires_soon(self, host: PooledHost) -> bool:
        """Whether the provider will end the host before a lease that begins now can finish."""
        if host.host is None or host.host.expires_at_s is None:
            return False
        margin_s = max(host.host.drain_s, (self._config.lease_ttl_s or 0.0) + EXPIRY_MARGIN_S)
        return time.time() + margin_s > host.host.expires_at_s
