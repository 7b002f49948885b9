"""The slot's root, built as helper/rootfs.c builds it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import struct

from . import kernel
from .config import SlotConfig
from .kernel import MS_BIND, MS_MOVE, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC, MS_REMOUNT, mount

DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
READ_ONLY = ("sys", "sysrq-trigger", "irq", "bus", "fs")
HIDDEN = ("kcore", "keys", "timer_list", "sched_debug", "latency_stats")
SIOCSIFFLAGS = 0x8914


def build_root(config: SlotConfig, layer_fds: list[int]) -> int:
    """Build and enter it; returns a descriptor of the writable layer. The working directory is the run directory."""
    mount("make mounts private", "none", "/", None, MS_REC | MS_PRIVATE)
    options = f"mode=755,size={config.upper_size}" if config.upper_size else "mode=755"
    mount("mount the writable layer", "tmpfs", "m", "tmpfs", MS_NOSUID | MS_NODEV, options)
    os.chdir("m")
    for name in ("u", "w", "root"):
        os.mkdir(name, 0o755)
    upper = os.open("u", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _attach_layers(config, layer_fds)
    _overlay(config, "", "", "u", "w", "root")
    for index, part in enumerate(config.parts):
        os.makedirs(f"u/{part}", exist_ok=True)
        os.mkdir(f"w{index}")
        _overlay(config, f"/{part}", f":/{part}", f"u/{part}", f"w{index}", f"root/{part}")
    _make_devices()
    with contextlib.suppress(FileExistsError):
        os.mkdir("root/proc", 0o555)
    mount("mount /proc", "proc", "root/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if not config.user_ns:
        _protect_proc()
    if config.net_ns:
        _bring_up_loopback(config)
    kernel.set_host_name(config.hostname)
    _enter_root()
    return upper


def _attach_layers(config: SlotConfig, fds: list[int]) -> None:
    for index, fd in enumerate(fds):
        name = f"l{index}"
        os.mkdir(name, 0o755)
        flags = kernel.MOVE_MOUNT_F_EMPTY_PATH
        kernel.syscall("attach a layer", kernel.SYS_MOVE_MOUNT, fd, b"", -100, name.encode(), flags)
        config.layers[index] = name


def _overlay(config: SlotConfig, below: str, last: str, upper: str, work: str, target: str) -> None:
    lower = ":".join(f"{layer}{below}" for layer in config.layers) + last
    # gVisor takes absolute names only; in a user namespace there may be no right to what lies above.
    here = "" if config.user_ns else f"{os.getcwd()}/"
    options = f"lowerdir={lower},upperdir={here}{upper},workdir={here}{work}{',userxattr' if config.user_ns else ''}"
    mount("mount the overlay", "overlay", target, "overlay", MS_NODEV, options)


def _make_devices() -> None:
    os.makedirs("root/dev", exist_ok=True)
    mount("mount /dev", "tmpfs", "root/dev", "tmpfs", MS_NOSUID | MS_NOEXEC, "size=256k,mode=755")
    for name in DEVICES:
        os.close(os.open(f"root/dev/{name}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        mount("bind a device", f"/dev/{name}", f"root/dev/{name}", None, MS_BIND)
    os.mkdir("root/dev/shm")
    mount("mount /dev/shm", "tmpfs", "root/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "size=64m,mode=1777")
    os.mkdir("root/dev/pts")
    options = "newinstance,ptmxmode=0666,mode=620"
    mount("mount /dev/pts", "devpts", "root/dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, options)
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "stdin": "/proc/self/fd/0"}
    links.update(stdout="/proc/self/fd/1", stderr="/proc/self/fd/2")
    for name, target in links.items():
        os.symlink(target, f"root/dev/{name}")


def _protect_proc() -> None:
    """Without a user namespace id 0 of the slot is the host's."""
    ro = MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC
    for name in READ_ONLY:
        path = f"root/proc/{name}"
        if os.path.exists(path):
            mount("protect /proc", path, path, None, MS_BIND | MS_REC)
            mount("protect /proc", None, path, None, ro)
    for name in HIDDEN:
        if os.path.exists(f"root/proc/{name}"):
            mount("hide part of /proc", "/dev/null", f"root/proc/{name}", None, MS_BIND)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            fcntl.ioctl(sock, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", 0x1 | 0x40))
        except OSError as error:
            if error.errno != errno.ENOTTY:
                raise
            _reach_itself(sock)  # gVisor knows no way to bring loopback up, because there it is up from the start


def _reach_itself(sock: socket.socket) -> None:
    sock.settimeout(1.0)
    sock.bind(("127.0.0.1", 0))
    sock.sendto(b"!", sock.getsockname())
    sock.recv(1)


def _borrow_network() -> None:
    """A network of a user namespace of its own, which a child makes: for containers that lack NET_ADMIN."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError):
            kernel.unshare("make a network", kernel.CLONE_NEWUSER | kernel.CLONE_NEWNET)
            _loopback_up()
            socket.send_fds(theirs, [b"!"], [os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)])
        os._exit(0)
    theirs.close()
    with ours:
        _, fds, _, _ = socket.recv_fds(ours, 1, 1)
    os.waitpid(pid, 0)
    if not fds:
        raise kernel.KernelError("bring up loopback", errno.EPERM)
    kernel.setns("bring up loopback", fds[0], kernel.CLONE_NEWNET)
    os.close(fds[0])


def _bring_up_loopback(config: SlotConfig) -> None:
    try:
        _loopback_up()
    except OSError:
        if config.user_ns:
            raise
        _borrow_network()


def _enter_root() -> None:
    os.chdir("root")
    try:
        kernel.syscall("pivot_root", kernel.SYS_PIVOT_ROOT, b".", b".")
    except kernel.KernelError:
        mount("pivot_root", ".", "/", None, MS_MOVE)
        os.chroot(".")
    else:
        kernel.unmount_detached("leave the old root", ".")
    os.chdir("/")
