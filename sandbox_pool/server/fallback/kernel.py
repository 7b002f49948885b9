"""System calls that Python has no function for, by number for the two architectures slots run on."""

from __future__ import annotations

import ctypes
import os
import platform
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_X86 = platform.machine() == "x86_64"
SYS_CLONE, SYS_PIVOT_ROOT, SYS_CAPGET, SYS_CAPSET = (56, 155, 125, 126) if _X86 else (220, 41, 90, 91)
SYS_OPEN_TREE, SYS_MOVE_MOUNT, SYS_MOUNT_SETATTR = 428, 429, 442
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_MOVE = 1, 2, 4, 8, 32, 4096, 8192
MS_REC, MS_PRIVATE, MNT_DETACH = 16384, 1 << 18, 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
AT_EMPTY_PATH, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH, MOUNT_ATTR_IDMAP = 0x1000, 1, 4, 0x100000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_SECCOMP, PR_CAPBSET_DROP = 1, 4, 15, 22, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 36, 38
CAP_VERSION = 0x20080522


class KernelError(OSError):
    """A refused call, with the step it was part of."""

    def __init__(self, step: str, number: int) -> None:
        super().__init__(number, os.strerror(number))
        self.step = step


def _checked(step: str, result: int) -> int:
    if result < 0:
        raise KernelError(step, ctypes.get_errno())
    return result


def syscall(step: str, number: int, *arguments: object) -> int:
    """A raw system call; `step` says what it was for when it fails."""
    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(step, int(_libc.syscall(ctypes.c_long(number), *values)))


def mount(step: str, source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, options)]
    _checked(step, int(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])))


def unmount_detached(step: str, target: str) -> None:
    """umount2(2), lazily."""
    _checked(step, int(_libc.umount2(os.fsencode(target), MNT_DETACH)))


def prctl(step: str, option: int, value: int) -> None:
    """prctl(2) with one argument."""
    _checked(step, int(_libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0)))


def unshare(step: str, flags: int) -> None:
    """unshare(2)."""
    _checked(step, int(_libc.unshare(flags)))


def setns(step: str, fd: int, kind: int) -> None:
    """setns(2)."""
    _checked(step, int(_libc.setns(fd, kind)))


def set_host_name(name: str) -> None:
    """sethostname(2), which Python offers under the same name but only since it runs as root."""
    data = name.encode()
    _checked("set the host name", int(_libc.sethostname(data, ctypes.c_size_t(len(data)))))


def clone(flags: int, signal_number: int) -> int:
    """Fork into new namespaces; 0 in the child."""
    pid = syscall("clone the namespaces", SYS_CLONE, flags | signal_number, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    return pid


def clone_layer(path: str, userns: int) -> int:
    """A detached copy of the mount at `path`, its owners shifted into the user namespace."""
    step = "clone an id-mapped layer"
    tree = syscall(step, SYS_OPEN_TREE, -100, os.fsencode(path), OPEN_TREE_CLONE | os.O_CLOEXEC)
    attributes = struct.pack("=QQQQ", MOUNT_ATTR_IDMAP, 0, 0, userns)
    try:
        syscall(step, SYS_MOUNT_SETATTR, tree, b"", AT_EMPTY_PATH, attributes, len(attributes))
    except KernelError:
        os.close(tree)
        raise
    return tree


def set_capabilities(kept: int) -> None:
    """Give up every capability but these."""
    header = struct.pack("=Ii", CAP_VERSION, 0)
    current = ctypes.create_string_buffer(24)
    syscall("read capabilities", SYS_CAPGET, header, current)
    permitted = struct.unpack("=IIIIII", current.raw)
    low, high = kept & 0xFFFFFFFF & permitted[1], (kept >> 32) & permitted[4]
    syscall("set capabilities", SYS_CAPSET, header, struct.pack("=IIIIII", low, low, 0, high, high, 0))


def limit_capabilities(kept: int) -> None:
    """What an exec can never give back."""
    for capability in range(64):
        if not kept >> capability & 1:
            try:
                prctl("drop capabilities", PR_CAPBSET_DROP, capability)
            except KernelError as error:
                if error.errno != 22:  # EINVAL: this kernel has no such capability
                    raise


def install_seccomp(program: bytes) -> None:
    """Load a filter: packed 8-byte instructions."""
    code = ctypes.create_string_buffer(program, len(program))
    description = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    _checked("install the seccomp filter", int(_libc.prctl(PR_SET_SECCOMP, 2, description, 0, 0)))
