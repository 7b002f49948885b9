"""A place for overlay layers. The kernel refuses a layer that lies inside another one, and the host's root is a layer:
so this place must be on a file system of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os

from ..host_files import check_private, open_private
from ..images.user_ids import remove_mapped

CLONE_NEWNS = 0x00020000
MS_NOSUID_NODEV = 2 | 4
MS_REC_PRIVATE = 0x4000 | (1 << 18)
MNT_DETACH = 2
SHARED_MEMORY = "/dev/shm"
PREFIX = "hermes_"
SCRATCH = "scratch"
"""A link in a folder there: to the scratch space whose layers it holds."""


def _private_tmpfs(path: str) -> bool:
    """A tmpfs in a mount namespace of this process alone: it ends with the process, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) != 0:
        return False
    return bool(libc.mount(b"tmpfs", path.encode(), b"tmpfs", MS_NOSUID_NODEV, b"mode=700") == 0)


def shared_memory_paths(scratch: str) -> list[str]:
    """Where layers go for users who may not mount: several names, because anyone may take one."""
    digest = hashlib.sha1(os.path.realpath(scratch).encode()).hexdigest()[:12]
    return [os.path.join(SHARED_MEMORY, f"{PREFIX}{digest}_{number}") for number in range(8)]


def make_layers_dir(scratch: str) -> str:
    """An empty directory for layers that only this user can enter, apart from the host's root where that is possible.

    As root it is always a mount of this process alone, without set-id bits and devices: a layer holds the owners and
    modes that an agent gave its files.
    """
    path = os.path.join(scratch, "layers")
    os.makedirs(path, mode=0o700, exist_ok=True)
    os.chmod(path, 0o700)
    if os.geteuid() == 0 and _private_tmpfs(path):
        return path
    if os.stat(path).st_dev != os.stat("/").st_dev:
        return path
    sweep_shared_memory()
    return usable_shared_memory(scratch) or path


def usable_shared_memory(scratch: str) -> str | None:
    """A folder of this user alone in shared memory; None where there is none, or other users have made them first."""
    for other in shared_memory_paths(scratch):
        try:
            fd = open_private(other)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_dev != os.stat("/").st_dev:
                with contextlib.suppress(FileExistsError):
                    os.symlink(os.path.realpath(scratch), SCRATCH, dir_fd=fd)
                return other
        finally:
            os.close(fd)
    return None


def sweep_shared_memory() -> None:
    """Remove what servers of this user left whose scratch space is gone: nobody else will come for it."""
    for entry in os.scandir(SHARED_MEMORY) if os.path.isdir(SHARED_MEMORY) else ():
        with contextlib.suppress(OSError):
            ours = entry.name.startswith(PREFIX) and check_private(entry.path)
            if ours and not os.path.lexists(os.readlink(os.path.join(entry.path, SCRATCH))):
                remove_mapped(entry.path)


def remove_layers_dir(scratch: str) -> None:
    """What an earlier server left there, or this one."""
    path = os.path.join(scratch, "layers")
    if os.path.ismount(path):
        ctypes.CDLL(None).umount2(path.encode(), MNT_DETACH)
    remove_mapped(path)
    for other in shared_memory_paths(scratch):
        with contextlib.suppress(OSError):
            if check_private(other):
                remove_mapped(other)
