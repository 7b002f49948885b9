"""Which folders and files of the host a spec may put into its slots."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from typing import Any

SYSTEM = ("/proc", "/sys", "/dev", "/run", "/boot", "/var/lib/docker", "/var/lib/containerd", "/var/lib/containers")
"""The kernel's and the engines' own: their sockets and state are the host."""


def mount_fields(mounts: Sequence[Mapping[str, Any]], keep_out: Sequence[str]) -> list[tuple[str, Any]]:
    """The zygote's instructions; ValueError, in one sentence, for what no slot may have."""
    fields: list[tuple[str, Any]] = []
    for mount in mounts:
        source = _checked(str(mount["source"]), keep_out)
        mode = "ro" if mount.get("read_only", True) else "rw"
        fields += [("mount_from", source), ("mount_to", str(mount["target"])), ("mount_mode", mode)]
    return fields


def _checked(path: str, keep_out: Sequence[str]) -> str:
    """The real path, which is what is mounted: a link that changes meanwhile leads nowhere else."""
    real = os.path.realpath(path)
    try:
        mode = os.stat(real).st_mode
    except OSError as error:
        raise ValueError(f"{path} cannot be mounted: {os.strerror(error.errno or 0)} on this host") from None
    if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
        raise ValueError(f"{path} cannot be mounted: it is neither a folder nor a file")
    for kept in keep_out:
        if _overlap(real, os.path.realpath(kept)):
            raise ValueError(f"{path} cannot be mounted: it holds, or is in, {kept}, which is this pool's own")
    for system in SYSTEM:
        if _overlap(real, os.path.realpath(system)):
            raise ValueError(f"{path} cannot be mounted: it holds, or is in, {system}, which is the host's own")
    return real


def _overlap(one: str, other: str) -> bool:
    return os.path.commonpath([one, other]) in (one, other)
