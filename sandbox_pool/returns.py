"""What becomes of a slot that comes back: reset and proven clean, or quarantined and its host replaced."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sandbox_pool.errors import SandboxError, SandboxLost, StaleLease
from sandbox_pool.fleet import Fleet
from sandbox_pool.hosts import Grant, PooledHost
from sandbox_pool.metrics import PoolMetrics

log = logging.getLogger(__name__)


class Returns:
    """Every path ends with the slot free, quarantined, or gone with its host."""

    def __init__(
        self, timeout_s: float, fleet: Fleet, metrics: PoolMetrics, on_done: Callable[[PooledHost], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._fleet = fleet
        self._metrics = metrics
        self._on_done = on_done

    async def reset(self, grant: Grant) -> None:
        """Reset the slot of a lease that is over."""
        began_s = time.monotonic()
        problem = await self._release(grant.host, grant.slot, grant.epoch)
        self._metrics.observe("reset", time.monotonic() - began_s)
        self._settle(grant.host, grant.slot, problem)

    async def recover(self, host: PooledHost, slot: int, error: Exception) -> None:
        """Leasing failed at the server: find out what became of the slot, and get it back or give it up."""
        if isinstance(error, SandboxLost) and not isinstance(error, StaleLease) and host.client_is_dead():
            self._fleet.lose(host, str(error))
        if host.state == "gone":
            return
        self._settle(host, slot, await self._recovery_problem(host, slot))

    async def _recovery_problem(self, host: PooledHost, slot: int) -> str:
        assert host.client is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                states = {state.slot: state for state in await host.client.slots()}
        except (TimeoutError, SandboxError) as error:
            return f"the state of slot {slot} is unknown: {error or 'no answer'}"
        state = states.get(slot)
        if state is not None and state.state == "leased":
            return await self._release(host, slot, state.epoch)
        if state is not None and state.state == "free":
            return ""
        return f"slot {slot} is {state.state if state else 'missing'}"

    async def _release(self, host: PooledHost, slot: int, epoch: int) -> str:
        """Reset the slot; why it cannot be used again, or nothing."""
        assert host.client is not None
        try:
            async with asyncio.timeout(self._timeout_s):
                report = await host.client.release(slot, epoch)
        except TimeoutError:
            return f"slot {slot} was not reset after {self._timeout_s:g} s"
        except SandboxError as error:
            return f"slot {slot} could not be reset: {error}"
        return "" if report.clean else f"slot {slot} is not clean: {'; '.join(report.problems)}"

    def _settle(self, host: PooledHost, slot: int, problem: str) -> None:
        if host.state == "gone":
            return
        if problem:
            log.warning("%s: %s; the host will be replaced", host.name, problem)
            self._metrics.bump("quarantines")
            host.quarantine(slot, problem)
        else:
            host.put_back(slot)
        self._on_done(host)
