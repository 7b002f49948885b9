"""How many hosts there should be: a pure function of what is wanted and what there is.

Order of the rules: (1) keep `min_hosts`; (2) start what the waiting need, oldest first, within the cap on starting
hosts and `max_hosts`; (3) when `max_hosts` is reached and somebody waits for a key without a host, stop an idle
host of another key; (4) stop hosts that were idle for `idle_s`, longest first, down to `min_hosts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sandbox_pool.config import PoolConfig


@dataclass(frozen=True)
class HostView:
    """What scaling needs to know of a host that counts against `max_hosts`."""

    name: str
    key: str
    starting: bool
    free: int
    idle_for_s: float | None
    """Seconds since the last lease ended; None while it is starting, leased, resetting or holds a snapshot."""


@dataclass(frozen=True)
class Plan:
    """What to do now. Starts are keys, one per host."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


def plan(
    hosts: Sequence[HostView],
    waiting: Mapping[str, int],
    config: PoolConfig,
    *,
    default_key: str,
    blocked: frozenset[str] = frozenset(),
) -> Plan:
    """What to start and stop.

    `waiting` is in order of the oldest waiter; `blocked` keys failed lately and must not be started yet.
    """
    starting = sum(host.starting for host in hosts)
    wanted = [key for key in _wanted(hosts, waiting, config, default_key) if key not in blocked]
    room = min(config.max_hosts - len(hosts), config.max_starting - starting)
    start = wanted[: max(0, room)]
    stop = _too_idle(hosts, waiting, config)
    unserved = [key for key in wanted[len(start) :] if key in waiting and not any(host.key == key for host in hosts)]
    if unserved and len(hosts) + len(start) >= config.max_hosts:
        stop += _evictable(hosts, waiting, set(unserved), stop)[: len(unserved)]
    return Plan(tuple(start), tuple(stop))


def _wanted(hosts: Sequence[HostView], waiting: Mapping[str, int], config: PoolConfig, default_key: str) -> list[str]:
    """Keys to start hosts for, in order, regardless of caps."""
    wanted: list[str] = []
    for key, count in waiting.items():
        coming = sum(config.slots_per_host if host.starting else host.free for host in hosts if host.key == key)
        missing = max(0, count - coming)
        wanted += [key] * -(-missing // config.slots_per_host)
    spare = config.min_hosts - len(hosts) - len(wanted)
    return wanted + [default_key] * max(0, spare)


def _too_idle(hosts: Sequence[HostView], waiting: Mapping[str, int], config: PoolConfig) -> list[str]:
    idle = [host for host in hosts if host.idle_for_s is not None and host.idle_for_s >= config.idle_s]
    idle = [host for host in idle if not waiting.get(host.key)]
    idle.sort(key=lambda host: -(host.idle_for_s or 0.0))
    return [host.name for host in idle[: max(0, len(hosts) - config.min_hosts)]]


def _evictable(hosts: Sequence[HostView], waiting: Mapping[str, int], keys: set[str], gone: list[str]) -> list[str]:
    idle = [host for host in hosts if host.idle_for_s is not None and host.key not in keys and host.name not in gone]
    idle = [host for host in idle if not waiting.get(host.key)]
    return [host.name for host in sorted(idle, key=lambda host: -(host.idle_for_s or 0.0))]
