"""Levels of isolation: their order, and the refusal of less than a config demands."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, get_args

from sandbox_pool.config import Isolation
from sandbox_pool.errors import IsolationUnavailable

if TYPE_CHECKING:
    from sandbox_pool.client import HostInfo

log = logging.getLogger(__name__)

LEVELS: tuple[str, ...] = get_args(Isolation)
_told: set[tuple[str, tuple[str, ...]]] = set()


def rank(level: str) -> int:
    """0 is the strongest. A variant such as `namespaces-rootless` ranks as the level it begins with."""
    for position, name in enumerate(LEVELS):
        if level == name or level.startswith(f"{name}-"):
            return position
    return len(LEVELS)


def check_isolation(info: HostInfo, wanted: Isolation) -> None:
    """Refuse a host that isolates less than wanted; say loudly, once, when it is less than full isolation."""
    if rank(info.isolation) > rank(wanted):
        raise IsolationUnavailable(
            f"{info.host_id} isolates its slots by {info.isolation!r} only ({info.isolation_reason}); "
            f"min_isolation is {wanted!r}"
        )
    told = (info.isolation, tuple(info.missing))
    if told in _told:
        return
    _told.add(told)
    if rank(info.isolation) > 0:
        log.warning("slots are isolated by %r only: %s", info.isolation, info.isolation_reason)
    if info.missing:
        log.warning("not enforceable here: %s", ", ".join(info.missing))
