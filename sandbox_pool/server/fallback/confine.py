"""What a slot may not do, as the compiled helper enforces it: capabilities, limits, seccomp, Landlock."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import struct

from . import kernel
from .config import SlotConfig

CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE, SETFCAP = 0, 1, 3, 4, 5, 6, 7, 10, 31
KEPT = sum(1 << c for c in (CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE, SETFCAP))
_X86 = platform.machine() == "x86_64"
ARCH = 0xC000003E if _X86 else 0xC00000B7
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
ALLOW, ERRNO = 0x7FFF0000, 0x00050000
LD_ABS, JEQ, JGE, JSET, JA, RET = 0x20, 0x15, 0x35, 0x45, 0x05, 0x06
NAMESPACE_FLAGS = 0x7E020000
# The same calls in the same order as helper/seccomp.c, by number.
_COMMON = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442, 467)
_DENIED_X86 = (
    165, 166, 155, 161, 272, 308, 167, 168, 250, 248, 249, 321, 323, 298, 246, 320, 169, 163, 175, 313, 176, 304, 303,
    164, 227, 159, 305, 103, 179, 212, 180, 153, 170, 171, 279, 310, 311, 312, 300, 172, 173, 154, 134, 174, 177, 178,
    156,
)  # fmt: skip
_DENIED_ARM = (
    40, 39, 41, 51, 97, 268, 224, 225, 219, 217, 218, 280, 282, 241, 104, 294, 142, 89, 105, 273, 106, 265, 264, 170,
    112, 171, 266, 116, 60, 18, 42, 58, 161, 162, 239, 270, 271, 272, 262,
)  # fmt: skip
SYS_CLONE, SYS_SOCKET, SYS_CLONE3 = (56, 41, 435) if _X86 else (220, 198, 435)


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)


def seccomp_program(allow_inet: bool) -> bytes:
    """The filter, instruction by instruction."""
    code = [_op(LD_ABS, 4), _op(JEQ, ARCH, 1, 0), _op(RET, ERRNO | ENOSYS), _op(LD_ABS, 0)]
    if _X86:
        code += [_op(JGE, 0x40000000, 0, 1), _op(RET, ERRNO | ENOSYS)]
    for number in _COMMON + (_DENIED_X86 if _X86 else _DENIED_ARM):
        code += [_op(JEQ, number, 0, 1), _op(RET, ERRNO | EPERM)]
    families = [1, 2, 10, 16] if allow_inet else [1]
    code += [_op(JEQ, SYS_SOCKET, 0, len(families) + 3), _op(LD_ABS, 16)]
    code += [_op(JEQ, family, len(families) - i, 0) for i, family in enumerate(families)]
    code += [_op(RET, ERRNO | EAFNOSUPPORT), _op(RET, ALLOW)]
    code += [_op(JEQ, SYS_CLONE, 0, 3), _op(LD_ABS, 16), _op(JSET, NAMESPACE_FLAGS, 0, 2), _op(RET, ERRNO | EPERM)]
    code += [_op(JA, 1), _op(RET, ALLOW), _op(LD_ABS, 0), _op(JEQ, SYS_CLONE3, 0, 1), _op(RET, ERRNO | ENOSYS)]
    return b"".join([*code, _op(RET, ALLOW)])


def set_limits(config: SlotConfig) -> None:
    """Limits by process or by user, where no cgroup does it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if config.max_processes:
        resource.setrlimit(resource.RLIMIT_NPROC, (config.max_processes, config.max_processes))
    if config.max_memory_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (config.max_memory_bytes, config.max_memory_bytes))


def drop_init_privileges(config: SlotConfig) -> None:
    """With namespaces the init itself is confined for good."""
    kernel.prctl("hide the init", kernel.PR_SET_DUMPABLE, 0)
    if not config.namespaces:
        if config.landlock and config.run_uid:  # one domain for the slot, as helper/privileges.c has it
            kernel.prctl("set no_new_privs", kernel.PR_SET_NO_NEW_PRIVS, 1)
            restrict_with_landlock(config)
        return
    kernel.limit_capabilities(KEPT)
    kernel.set_capabilities(KEPT)
    set_limits(config)
    kernel.prctl("set no_new_privs", kernel.PR_SET_NO_NEW_PRIVS, 1)
    if config.seccomp:
        kernel.install_seccomp(seccomp_program(True))


def become_command(config: SlotConfig) -> None:
    """Last step before a command or a file worker does its work."""
    if config.namespaces:
        return
    set_limits(config)
    if config.run_uid:
        kernel.limit_capabilities(0)
        os.setgroups([])
        os.setresgid(config.run_uid, config.run_uid, config.run_uid)
        os.setresuid(config.run_uid, config.run_uid, config.run_uid)
        kernel.set_capabilities(0)
    if config.run_uid or config.landlock or config.seccomp:
        kernel.prctl("set no_new_privs", kernel.PR_SET_NO_NEW_PRIVS, 1)
    if config.landlock and not config.run_uid:
        restrict_with_landlock(config)
    if config.seccomp:
        kernel.install_seccomp(seccomp_program(not config.no_inet))


READABLE = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/etc", "/proc", "/var/lib/dpkg",
    "/sys/devices/system/cpu",
)  # fmt: skip
DEVICES = ("null", "zero", "full", "random", "urandom", "tty", "pts", "ptmx")
READ_AND_RUN, ON_FILES, TRUNCATE, IOCTL_DEV = 13, 1 | 2 | 4, 1 << 14, 1 << 15
SHARED_MEMORY = 2 | 4 | 1 << 5 | 1 << 8 | TRUNCATE
"""Write, read, remove and make files."""


def landlock_abi() -> int:
    """Version of Landlock here; 0 is none."""
    try:
        return kernel.syscall("ask for Landlock", kernel.SYS_LANDLOCK_CREATE, 0, 0, 1)
    except kernel.KernelError:
        return 0


def _allow(ruleset: int, path: str, access: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            access &= ON_FILES | TRUNCATE | IOCTL_DEV
        rule = struct.pack("=Qi", access, fd)
        kernel.syscall("add a Landlock rule", kernel.SYS_LANDLOCK_ADD, ruleset, 1, rule, 0)
        os.close(fd)


def restrict_with_landlock(config: SlotConfig) -> None:
    """The system read-only, the slot's own directory writable, nothing else."""
    abi = landlock_abi()
    handled = (1 << 13) - 1
    for version, right in ((2, 1 << 13), (3, TRUNCATE), (5, IOCTL_DEV)):
        handled |= right if abi >= version else 0
    attributes = struct.pack("=QQQ", handled, 3 if abi >= 4 and config.no_inet else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = kernel.syscall("create a Landlock ruleset", kernel.SYS_LANDLOCK_CREATE, attributes, size, 0)
    _allow(ruleset, config.root, handled)
    for path in READABLE:
        _allow(ruleset, path, READ_AND_RUN)
    for name in DEVICES:
        _allow(ruleset, f"/dev/{name}", (2 | 4 | 8 | TRUNCATE | IOCTL_DEV) & handled)
    if config.run_uid:
        _allow(ruleset, "/dev/shm", SHARED_MEMORY & handled)
    kernel.syscall("enforce Landlock", kernel.SYS_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)
