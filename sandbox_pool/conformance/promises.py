"""Which promises a level of isolation makes. What it cannot promise is declared here, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sandbox_pool.isolation import rank

if TYPE_CHECKING:
    from sandbox_pool.client import HostInfo

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


def not_promised(needs: tuple[str, ...], info: HostInfo, *, on_this_machine: bool) -> str | None:
    """Why a check with these needs does not apply to this host, or None when it does."""
    for need in needs:
        if need == "this-machine":
            if not on_this_machine:
                return "the slot server runs elsewhere: its machine cannot be looked at from here"
        elif need in LIMITS:
            lacking = [name for name in LIMITS[need] if name in info.missing]
            if lacking:
                return f"{info.isolation}: the host says that it has no {lacking[0]} {_WHAT.get(lacking[0], 'limit')}"
        elif need == "writable-root" and info.variant == "rootless":
            return "rootless: an ordinary user may not change files of the host's root, not even in a layer of its own"
        else:
            level, reason = STRONGEST_WITHOUT[need]
            if rank(info.isolation) >= rank(level):
                return f"{info.isolation}: {reason}"
    return None
