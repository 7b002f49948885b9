"""Runs checks against a pool and says what became of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from sandbox_pool.client import HostInfo
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.conformance.model import Check, CheckFailed, CheckResult
from sandbox_pool.conformance.promises import not_promised
from sandbox_pool.pool import SlotPool


async def make_context(pool: SlotPool) -> CheckContext:
    """Look at the host behind the pool and get ready to check it."""
    async with pool.lease("check-probe") as box:
        info = box.host_info
        on_this_machine = _runs_here(info, box.endpoint.address)
    return CheckContext(pool, info, on_this_machine)


def _runs_here(info: HostInfo, address: str) -> bool:
    """Whether the slot server is a process of this machine, so that checks can look at it from outside."""
    if address.startswith("unix:"):
        return True
    if not address.startswith("tcp:127."):
        return False
    try:
        return info.host_id.encode() in Path(f"/proc/{info.pid}/cmdline").read_bytes()
    except OSError:
        return False


async def run_check(check: Check, context: CheckContext) -> CheckResult:
    """Run one check. Whatever goes wrong in it is a failure of the promise."""
    reason = not_promised(check.needs, context.info, on_this_machine=context.on_this_machine)
    if reason is not None:
        return CheckResult(check.id, check.promise, "not promised", reason)
    began_s = time.monotonic()
    detail = ""
    try:
        async with asyncio.timeout(check.timeout_s):
            await check.body(context)
    except CheckFailed as failure:
        detail = str(failure) or "failed"
    except TimeoutError:
        detail = f"not done after {check.timeout_s:g} s"
    except Exception as error:  # noqa: BLE001 - any error in a check means that the promise was not kept
        detail = f"{type(error).__name__}: {error}"
    return CheckResult(check.id, check.promise, "failed" if detail else "passed", detail, time.monotonic() - began_s)


async def run_checks(checks: Sequence[Check], context: CheckContext, at_once: int = 4) -> AsyncIterator[CheckResult]:
    """Run checks, a few at a time; results come as they are known."""
    gate = asyncio.Semaphore(at_once)

    async def guarded(check: Check) -> CheckResult:
        async with gate:
            return await run_check(check, context)

    tasks = [asyncio.create_task(guarded(check)) for check in checks]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
