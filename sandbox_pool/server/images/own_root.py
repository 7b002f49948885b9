"""The image of the container that this server runs in: specs that name it get slots with the container's whole root.

The root itself is a layer of their overlay: the kernel lets an overlay stand on a container's, and no further one on
that. What is mounted in the container (secrets, volumes, /proc) is not part of its root. The server's own files are,
and a layer of whiteouts above hides them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Mapping, Sequence
from typing import Any

from ..faults import SlotError
from ..isolation.levels import Level


class OwnImage:
    """The image by its name and settings."""

    def __init__(self, name: str, config: Mapping[str, Any] | None, mask: str, level: Level) -> None:
        self.name = name
        self._config = config
        self._mask = mask
        self._level = level

    def layers(self) -> dict[str, Any]:
        """What a slot is built from, as for an image whose layers were sent."""
        if self._level.variant == "rootless":
            raise SlotError(
                "image",
                f"slots of {self.name} need the whole root of the container they run in, which the kernel shows to root"
                " of the container alone: run the container as root",
            )
        if self._config is None:
            raise SlotError(
                "image", f"the ENV of {self.name} cannot be told from the secrets of its container: leave those out"
            )
        return {
            "key": self.name,
            "layers": [self._mask, "/"],
            "env": {str(key): str(value) for key, value in self._config["env"].items()},
            "workdir": str(self._config["workdir"]),
            "user": str(self._config["user"]),
        }


def make_mask(target: str, hidden: Sequence[str], root: str = "/") -> None:
    """A layer that hides these paths where they lie on the root's own file system."""
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    shutil.copystat(root, target)
    device = os.stat(root).st_dev
    for path in sorted({os.path.realpath(path) for path in hidden}, key=len):
        parent = os.path.dirname(path)
        if os.path.lexists(path) and os.stat(parent).st_dev == device:
            covered = os.path.join(target, os.path.relpath(path, root))
            _make_parents(os.path.dirname(covered), target, root)
            if os.path.isdir(os.path.dirname(covered)) and not os.path.lexists(covered):
                os.mknod(covered, stat.S_IFCHR, os.makedev(0, 0))


def _make_parents(folder: str, target: str, root: str) -> None:
    """Folders with everything that those of the root have, because the upper of two merged folders is the one seen."""
    if os.path.lexists(folder):  # a whiteout there hides all that is below
        return
    _make_parents(os.path.dirname(folder), target, root)
    source = os.path.join(root, os.path.relpath(folder, target))
    if os.path.isdir(os.path.dirname(folder)):
        os.mkdir(folder)
        info = os.stat(source)
        with contextlib.suppress(PermissionError):
            os.chown(folder, info.st_uid, info.st_gid)
        shutil.copystat(source, folder)
