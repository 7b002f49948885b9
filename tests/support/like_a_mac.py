"""Takes away from this process what a Mac does not have. Import it before anything else.

What other processes do stays as it is: they are the Linux machines that a client on a Mac drives.
"""

import ctypes
import os
import platform
import select
import selectors
import signal
import socket
import sys
import sysconfig
import types

LINUX_ONLY = {
    os: (
        "memfd_create pidfd_open eventfd splice setns unshare O_PATH O_TMPFILE sched_getaffinity sched_setaffinity "
        "getxattr setxattr listxattr removexattr getrandom copy_file_range posix_fallocate timerfd_create"
    ),
    select: "epoll",
    selectors: "EpollSelector",
    signal: "pidfd_send_signal sigtimedwait sigwaitinfo SIGRTMIN SIGRTMAX",
    socket: "AF_VSOCK AF_NETLINK AF_PACKET SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK",
}
for module, names in LINUX_ONLY.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
selectors.DefaultSelector = selectors.PollSelector


class MacLibrary(ctypes.CDLL):
    def __getattr__(self, name: str) -> object:
        if name in ("prctl", "mount", "umount2", "setns", "unshare", "syscall", "pivot_root"):
            raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")
        return super().__getattr__(name)


ctypes.CDLL = MacLibrary
HIDDEN = ("/proc", "/sys/", "/dev/shm", "/etc/machine-id")


def hidden(path: object) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.fsdecode(path).startswith(HIDDEN)


def without(call):
    def asked(path=".", *args, **kwargs):
        if hidden(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return call(path, *args, **kwargs)

    return asked


for name in ("stat", "lstat", "readlink", "listdir", "scandir", "access"):
    setattr(os, name, without(getattr(os, name)))


def refuse(event: str, arguments: tuple) -> None:
    if event == "open" and hidden(arguments[0]):
        raise FileNotFoundError(2, "No such file or directory", str(arguments[0]))


sysconfig.get_config_vars()  # read now: Python's own files are those of Linux
sys.addaudithook(refuse)
sys.platform = "darwin"
platform.system = lambda: "Darwin"
platform.machine = lambda: "arm64"
proxies = types.ModuleType("_scproxy")
proxies._get_proxy_settings = proxies._get_proxies = dict
sys.modules["_scproxy"] = proxies
