"""A place for overlay layers. The kernel refuses a layer that lies inside another one, and the host's root is a layer:
so this place must be on a file system of its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os

from ..host_files import check_private, open_private, remove_tree

CLONE_NEWNS = 0x00020000
MS_NOSUID_NODEV = 2 | 4
MS_REC_PRIVATE = 0x4000 | (1 << 18)
MNT_DETACH = 2
SHARED_MEMORY = "/dev/shm"


def _private_tmpfs(path: str) -> bool:
    """A tmpfs in a mount namespace of this process alone: it ends with the process, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0 or libc.mount(b"none", b"/", None, MS_REC_PRIVATE, None) != 0:
        return False
    return bool(libc.mount(b"tmpfs", path.encode(), b"tmpfs", MS_NOSUID_NODEV, b"mode=711") == 0)


def shared_memory_path(scratch: str) -> str:
    """Where layers go for users who may not mount."""
    digest = hashlib.sha1(os.path.realpath(scratch).encode()).hexdigest()[:12]
    return os.path.join(SHARED_MEMORY, f"hermes_{digest}")


def make_layers_dir(scratch: str) -> str:
    """An empty directory for layers, on another file system than the host's root where that is possible."""
    path = os.path.join(scratch, "layers")
    os.makedirs(path, mode=0o711, exist_ok=True)
    if os.stat(path).st_dev != os.stat("/").st_dev or (os.geteuid() == 0 and _private_tmpfs(path)):
        return path
    return usable_shared_memory(scratch) or path


def usable_shared_memory(scratch: str) -> str | None:
    """A folder of this user alone in shared memory; None where there is none, or another user has made it first."""
    other = shared_memory_path(scratch)
    try:
        fd = open_private(other)
    except OSError:
        return None
    try:
        return other if os.fstat(fd).st_dev != os.stat("/").st_dev else None
    finally:
        os.close(fd)


def remove_layers_dir(scratch: str) -> None:
    """What an earlier server left there, or this one."""
    path = os.path.join(scratch, "layers")
    if os.path.ismount(path):
        ctypes.CDLL(None).umount2(path.encode(), MNT_DETACH)
    remove_tree(path)
    with contextlib.suppress(OSError):
        if check_private(shared_memory_path(scratch)):
            remove_tree(shared_memory_path(scratch))
