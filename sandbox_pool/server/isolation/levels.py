"""Isolation levels: what each one asks of the kernel, and which one this place allows, found by building a slot.

Nothing is concluded from version numbers or the environment. Strongest first; every level that was refused is reported
with the step that failed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..faults import SlotError

UID_RANGE = 65_536
ALL_RANGES = 65_536
"""Of 32 bits of user ids; the first 16 are left to others."""
USUAL_SLOTS = 599
"""A server takes ids for so many slots, or for as many as it has, and for one more: owners beyond an image's range."""
MOST_HIGH_IDS = 300
"""The kernel takes 340 lines of an id map."""
WORKDIR = "/workspace"
"""Where commands start when neither spec nor image says."""
NAME_SERVERS_LIMIT = 10_000
RUN_UIDS = range(20_000, 60_000, 1_000)
"""First ids of the blocks of which a server takes one, where a slot is a user of the host."""


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
    stranger: bool = False
    """The host's root is shown with a stranger's rights (helper/view.c)."""

    @property
    def label(self) -> str:
        """Name for people and for `--level`."""
        return f"{self.name}-{self.variant}" if self.variant else self.name


LEVELS: tuple[Level, ...] = (
    Level("namespaces", "root", user_ns=True, namespaces=True, idmap=True, seccomp=True, stranger=True),
    Level("namespaces", "rootless", user_ns=True, namespaces=True, seccomp=True),
    Level("namespaces", "nouser", namespaces=True, seccomp=True, stranger=True),
    # Overlays cannot be stacked on a root that is one already, as in most containers.
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
    parts: tuple[str, ...]
    """What slots see of the host's root besides copies (isolation/host_view.py)."""
    uid_base: int
    """First id of the ranges that slots with a user namespace are mapped to."""
    high_base: int
    """First id of owners in images beyond that range."""
    run_uid_base: int
    """First id of slots that are users of the host."""
    id_ranges: bool = False
    """An ordinary user's zygote runs in a user namespace with the ids of /etc/subuid, and slots get them all."""

    @property
    def views(self) -> str:
        """Where the host's root is made ready to be shown."""
        return os.path.join(self.layers, "views")

    @property
    def below_images(self) -> str:
        """The lowest layer of every slot with an image (images/below.py)."""
        return os.path.join(self.layers, "below-images")


def choose_uids(scratch: str, slots: int) -> tuple[int, int, int]:
    """`uid_base`, `high_base` and `run_uid_base` of a server, apart from those of other servers on this host."""
    number = int(hashlib.sha1(scratch.encode()).hexdigest()[:8], 16)
    used = _owners_of_processes()
    blocks = [RUN_UIDS[(number + i) % len(RUN_UIDS)] for i in range(len(RUN_UIDS))]
    free = [block for block in blocks if not any(block <= uid < block + RUN_UIDS.step for uid in used)]
    ranges = max(USUAL_SLOTS, slots) + 1
    first = 16 + number % ((ALL_RANGES - 1 - 16) // ranges) * ranges
    return UID_RANGE * first, UID_RANGE * (first + ranges - 1), (free or blocks)[0]


def _owners_of_processes() -> set[int]:
    owners = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile
                owners.add(entry.stat().st_uid)
    return owners


def slot_root(place: Place, index: int) -> str:
    """Directory of a slot at the levels without a mount namespace."""
    return os.path.join(place.scratch, "slots", str(index))


def mark(scratch: str) -> int:
    """What processes of slots in this scratch space have as their limit of locks, which means nothing to the kernel."""
    return int.from_bytes(hashlib.sha256(os.fsencode(os.path.realpath(scratch))).digest()[:7], "big") | 1 << 56


def run_uid(level: Level, place: Place, index: int) -> int | None:
    """The user id of a slot's commands where a slot is a user; None where it is not."""
    return place.run_uid_base + index if level.own_uid and os.geteuid() == 0 else None


def build_fields(
    level: Level, place: Place, index: int, spec: Mapping[str, Any], layers: Sequence[str]
) -> list[tuple[str, Any]]:
    """The zygote's instructions for one slot. `layers` are snapshot layers, topmost first."""
    no_network = spec.get("network", "none") != "host"
    pids = spec.get("pids")
    by_user = level.user_ns or run_uid(level, place, index) is not None
    fields: list[tuple[str, Any]] = [
        ("hostname", f"slot{index}"),
        ("namespaces", level.namespaces),
        ("user_ns", level.user_ns),
        ("net_ns", level.namespaces and no_network),
        ("idmap", level.idmap),
        ("seccomp", level.seccomp),
        ("landlock", level.landlock),
        ("no_inet", level.landlock and no_network),
        ("mark", None if level.namespaces else mark(place.scratch)),
        ("max_processes", pids + 8 if pids and by_user else None),
    ]
    if level.namespaces:
        return fields + _own_root(level, place, index, spec, layers)
    return fields + _shared_root(level, place, index)


def _own_root(
    level: Level, place: Place, index: int, spec: Mapping[str, Any], layers: Sequence[str]
) -> list[tuple[str, Any]]:
    image, disk_mb = spec.get("image"), spec.get("disk_mb")
    in_parts = not level.stranger and not image
    roots = [os.path.join(place.views, "view", "slot")] if in_parts else []
    if image:
        roots = [*image["layers"], place.below_images]
    return [
        *(("layer", path) for path in [*layers, *roots]),
        ("fork", bool(layers)),
        *(("part", name) for name in (place.parts if in_parts else ())),
        ("view", place.views if level.stranger and not image else None),
        ("workdir", spec.get("workdir") or _workdir(image) or WORKDIR),
        ("home", "" if image else "/root"),
        *(_of_image(spec, image) if image else ()),
        ("upper_size", f"{disk_mb}m" if disk_mb else None),
        ("uid_base", place.uid_base + index * UID_RANGE if level.idmap else None),
        ("uid_count", UID_RANGE if level.idmap or place.id_ranges else 1),
        *_high_ids(level, place, image),
    ]


def _high_ids(level: Level, place: Place, image: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """An image may have owners beyond the range of a slot: each gets an id of its own behind those of all slots."""
    ids = (image or {}).get("high_ids") or []
    if not ids or not level.idmap:
        return []
    if len(ids) > MOST_HIGH_IDS:
        raise SlotError("image", f"{len(ids)} owners beyond {UID_RANGE} in one image: a slot can have {MOST_HIGH_IDS}")
    return [("high_ids", "".join(f"{number} {place.high_base + position} 1\n" for position, number in enumerate(ids)))]


def _workdir(image: Mapping[str, Any] | None) -> str:
    """Of the image; the root itself stands for none, because a working directory can be kept and compared."""
    named = str(image["workdir"]) if image else ""
    return os.path.normpath(os.path.join("/", named)) if named.strip("/") else ""


def _of_image(spec: Mapping[str, Any], image: Mapping[str, Any]) -> list[tuple[str, Any]]:
    name_servers = ""
    if spec.get("network") == "host":
        with contextlib.suppress(OSError), open("/etc/resolv.conf") as file:
            name_servers = file.read(NAME_SERVERS_LIMIT)
    user = spec.get("user") or image.get("user") or ""
    return [("image", True), ("user", user), ("name_servers", name_servers)]


def _shared_root(level: Level, place: Place, index: int) -> list[tuple[str, Any]]:
    root = slot_root(place, index)
    return [
        ("root", root),
        ("workdir", os.path.join(root, "workspace")),
        ("home", os.path.join(root, "home")),
        ("run_uid", run_uid(level, place, index)),
    ]
