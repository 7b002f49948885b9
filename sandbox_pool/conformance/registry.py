"""Finds all checks: one module per subject, one function per promise."""

from __future__ import annotations

import functools
import importlib
import inspect

from sandbox_pool.conformance.check import Check

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
