"""Isolation levels: what each one asks of the kernel, and which one this place allows, found by building a slot.

Nothing is concluded from version numbers or the environment. Strongest first; every level that was refused is reported
with the step that failed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import SlotError
from .mask import visible_parts

UID_BASE = 200_000
UID_RANGE = 65_536
RUN_UID_BASE = 60_000


@dataclass(frozen=True)
class Level:
    """One way to isolate a slot."""

    name: str
    """namespaces, landlock, uid or plain: what `min_isolation` compares."""
    variant: str
    user_ns: bool = False
    namespaces: bool = False
    idmap: bool = False
    landlock: bool = False
    seccomp: bool = False
    own_uid: bool = False

    @property
    def label(self) -> str:
        """Name for people and for `--level`."""
        return f"{self.name}-{self.variant}" if self.variant else self.name


LEVELS: tuple[Level, ...] = (
    Level("namespaces", "root", user_ns=True, namespaces=True, idmap=True, seccomp=True),
    Level("namespaces", "rootless", user_ns=True, namespaces=True, seccomp=True),
    Level("namespaces", "nouser", namespaces=True, seccomp=True),
    Level("landlock", "", landlock=True, seccomp=True, own_uid=True),
    Level("uid", "", seccomp=True, own_uid=True),
    Level("plain", ""),
)
RANK = {"namespaces": 3, "landlock": 2, "uid": 1, "plain": 0}


def candidates(forced: str | None) -> Sequence[Level]:
    """Levels worth trying as this user: the kernel refuses root's levels to others, some make no sense as root."""
    if forced is not None:
        chosen = [level for level in LEVELS if forced in (level.label, level.name)]
        if not chosen:
            raise SlotError(
                "refused", f"unknown isolation level {forced!r}; known: {', '.join(x.label for x in LEVELS)}"
            )
        return chosen
    root = os.geteuid() == 0
    skipped = {"namespaces-rootless"} if root else {"namespaces-root", "namespaces-nouser", "uid"}
    return [level for level in LEVELS if level.label not in skipped]


@dataclass(frozen=True)
class Place:
    """Where slots are built on this host."""

    scratch: str
    layers: str
    """Directory for overlay layers."""
    mask: str
    """Layer that hides what of the host's root is nobody's business."""
    opaque: frozenset[str]
    """Attributes by which the mask could mark its directories."""


def slot_root(place: Place, index: int) -> str:
    """Directory of a slot at the levels without a mount namespace."""
    return os.path.join(place.scratch, "slots", str(index))


def run_uid(level: Level, index: int) -> int | None:
    """The user id of a slot's commands where a slot is a user; None where it is not."""
    return RUN_UID_BASE + index if level.own_uid and os.geteuid() == 0 else None


def build_fields(
    level: Level, place: Place, index: int, spec: Mapping[str, Any], layers: Sequence[str]
) -> list[tuple[str, Any]]:
    """The zygote's instructions for one slot. `layers` are snapshot layers, topmost first."""
    network = spec.get("network", "none")
    disk_mb, pids = spec.get("disk_mb"), spec.get("pids")
    fields: list[tuple[str, Any]] = [
        ("hostname", f"slot{index}"),
        ("namespaces", level.namespaces),
        ("user_ns", level.user_ns),
        ("net_ns", level.namespaces and network == "none"),
        ("idmap", level.idmap),
        ("seccomp", level.seccomp),
        ("landlock", level.landlock),
        ("no_inet", level.landlock and network == "none"),
        ("max_processes", pids + 8 if pids and (level.user_ns or level.own_uid) else None),
    ]
    if level.namespaces:
        image = spec.get("image")
        in_parts = level.variant == "rootless" and not image
        roots = [image] if image else [place.mask] if in_parts else [place.mask, "/"]
        fields += [("layer", path) for path in [*layers, *roots]]
        fields += [("part", name) for name in (visible_parts() if in_parts else ())]
        fields += [
            ("workdir", spec.get("workdir") or "/workspace"),
            ("home", "/root"),
            ("upper_size", f"{disk_mb}m" if disk_mb else None),
            ("uid_base", UID_BASE + index * UID_RANGE if level.idmap else None),
            ("uid_count", UID_RANGE if level.idmap else 1),
        ]
    else:
        root = slot_root(place, index)
        fields += [
            ("root", root),
            ("workdir", os.path.join(root, "workspace")),
            ("home", os.path.join(root, "home")),
            ("run_uid", run_uid(level, index)),
        ]
    return fields
