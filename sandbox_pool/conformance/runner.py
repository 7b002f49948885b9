"""Finds all checks (one module per subject, one function per promise), runs them against a pool and reports on each."""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from sandbox_pool.client.host_client import HostInfo
from sandbox_pool.config import rank
from sandbox_pool.conformance.check import Check, CheckFailed, CheckResult
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.pool.pool import SlotPool

GROUPS = (
    "execution",
    "state",
    "output",
    "timeouts",
    "files",
    "transfer",
    "processes",
    "pty",
    "snapshot",
    "isolation",
    "limits",
    "leases",
    "protocol",
)
STRONGEST_WITHOUT: dict[str, tuple[str, str]] = {
    "own-root": ("landlock", "the root file system is shared: only the workspace is the slot's own"),
    "writable-root": ("landlock", "the root file system is shared: only the workspace can be written"),
    "own-pids": ("landlock", "without a pid namespace the processes of other slots are visible"),
    "own-host-name": ("landlock", "without a UTS namespace the host name is the host's"),
    "own-ipc": ("landlock", "without an IPC namespace System V objects are shared"),
    "hidden-host-files": ("uid", "files of the host that everybody may read can be read"),
    "no-abstract-sockets": ("uid", "abstract sockets of the host can be reached"),
    "file-confinement": ("plain", "slots run as the user of the server"),
    "separate-users": ("plain", "slots run as the user of the server"),
    "no-privileges": ("plain", "slots have the privileges of the server"),
}
"""need -> the strongest level that does not have it, and why."""
LIMITS = {
    "memory-limit": ("memory",),
    "pids-limit": ("pids",),
    "cpu-limit": ("cpu",),
    "disk-limit": ("disk",),
    "network-off": ("network",),
    "own-loopback": ("network", "loopback"),
    "signals-between-commands": ("signals",),
    "controlling-terminal": ("tty",),
}
"""need -> what the host lists in `missing` when it cannot have it."""


_WHAT = {"network": "policy", "loopback": "of a slot's own", "signals": "between commands", "tty": "at /dev/tty"}


@functools.cache
def all_checks() -> tuple[Check, ...]:
    """Every check, in the order they are written down."""
    return tuple(check for group in GROUPS for check in _checks_of(group))


def _checks_of(group: str) -> list[Check]:
    module = importlib.import_module(f"sandbox_pool.conformance.checks.{group}")
    found = []
    for name, function in vars(module).items():
        marked = getattr(function, "__check__", None)
        if marked is None or not inspect.iscoroutinefunction(function):
            continue
        needs, timeout_s = marked
        promise = inspect.getdoc(function) or name
        found.append(Check(group, name, promise.splitlines()[0], needs, function, timeout_s))
    return found


TOOLS = ("python3", "pgrep")
"""Programs that some checks are written with."""
HOST_ROOT = "host-root"
"""Needed by checks of what slots see of the host's own root."""


def not_promised(
    needs: tuple[str, ...], info: HostInfo, *, on_this_machine: bool, absent: frozenset[str] = frozenset()
) -> str | None:
    """Why a check with these needs does not apply to this host, or None when it does.

    `absent` are tools that the image under check lacks, and `HOST_ROOT` where there is an image.
    """
    for need in needs:
        if need in absent:
            return "slots have an image as their root" if need == HOST_ROOT else f"the image has no {need}"
        if need in TOOLS or need == HOST_ROOT:
            continue
        if need == "this-machine":
            if not on_this_machine:
                return "the slot server runs elsewhere: its machine cannot be looked at from here"
        elif need in LIMITS:
            lacking = [name for name in LIMITS[need] if name in info.missing]
            if lacking:
                return f"{info.isolation}: the host says that it has no {lacking[0]} {_WHAT.get(lacking[0], 'limit')}"
        elif need == "writable-root" and info.variant == "rootless":
            if HOST_ROOT in absent:
                continue
            return "rootless: an ordinary user may not change files of the host's root, not even in a layer of its own"
        else:
            level, reason = STRONGEST_WITHOUT[need]
            if rank(info.isolation) >= rank(level):
                return f"{info.isolation}: {reason}"
    return None


async def make_context(pool: SlotPool) -> CheckContext:
    """Look at the host behind the pool and get ready to check it."""
    async with pool.lease("check-probe") as box:
        info = box.host_info
        on_this_machine = _runs_here(info, box.endpoint.address)
        absent = {HOST_ROOT} if box.spec.image else set()
        for tool in TOOLS if box.spec.image else ():
            if (await box.exec(f"command -v {tool}")).exit_code:
                absent.add(tool)
    return CheckContext(pool, info, on_this_machine, frozenset(absent))


def _runs_here(info: HostInfo, address: str) -> bool:
    """Whether the slot server is a process of this machine, in no container: checks can look at it from outside."""
    if not address.startswith(("unix:", "tcp:127.")):
        return False
    try:
        return info.host_id.encode() in Path(f"/proc/{info.pid}/cmdline").read_bytes()
    except OSError:
        return False


async def run_check(check: Check, context: CheckContext) -> CheckResult:
    """Run one check. Whatever goes wrong in it is a failure of the promise."""
    reason = not_promised(check.needs, context.info, on_this_machine=context.on_this_machine, absent=context.absent)
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
    limit = asyncio.Semaphore(at_once)

    async def guarded(check: Check) -> CheckResult:
        async with limit:
            return await run_check(check, context)

    tasks = [asyncio.create_task(guarded(check)) for check in checks]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
