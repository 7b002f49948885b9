"""PID 1 of an emulated sandbox: `python -S -E init.py <file of settings>`, in new namespaces.

It builds the root (an overlay on this machine's, the upper layer in memory), gives the sandbox its address, starts the
command, and then only reaps until that ends; its exit code is the command's. When it dies the kernel ends every process
of the sandbox, whatever session or process group that moved to. With `runsc` in its settings the command is in gVisor.
"""

import ctypes
import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys

LIBC = ctypes.CDLL(None, use_errno=True)
NOSUID, NODEV, NOEXEC, BIND, REC, PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFADDR = 0x8913, 0x8914, 0x8916
EMPTY = ("tmp", *(f"usr/share/{name}" for name in ("man", "doc", "icons", "locale")), "usr/local/go",
         "usr/lib/google-cloud-sdk")  # fmt: skip
"""What this machine may have many files in and an image has not: a slot server looks at each of them when it starts."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")


def mount(source, target, kind=None, flags=0, data=None):
    names = [None if name is None else os.fsencode(name) for name in (source, target, kind)]
    if LIBC.mount(*names, flags, None if data is None else os.fsencode(data)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {kind or 'bind'} {source} on {target}: {os.strerror(number)}")


def build_root(settings):
    """An overlay whose upper layer is in memory, so that it is gone with this process."""
    work = settings["work"]
    mount(None, "/", None, REC | PRIVATE)
    mount("tmpfs", work, "tmpfs", NOSUID)
    for name in ("upper", "work", "root"):
        os.mkdir(f"{work}/{name}")
    os.chmod(f"{work}/upper", 0o755)
    for name in EMPTY:
        if name == "tmp" or os.path.isdir(f"/{name}"):
            os.makedirs(f"{work}/upper/{name}")
            os.setxattr(f"{work}/upper/{name}", "trusted.overlay.opaque", b"y")
    layers = f"lowerdir=/,upperdir={work}/upper,workdir={work}/work"
    mount("overlay", f"{work}/root", "overlay", 0, layers)
    root = f"{work}/root"
    os.chmod(f"{root}/tmp", 0o1777)
    for name in ("proc", "dev", "sys"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    os.makedirs(root + settings["workdir"], exist_ok=True)
    tools = root + settings["tools_path"]
    os.makedirs(os.path.dirname(tools), exist_ok=True)
    shutil.copyfile(settings["tools"], tools)
    os.chmod(tools, 0o755)
    return root


def build_devices(root):
    mount("proc", f"{root}/proc", "proc", NOSUID | NODEV | NOEXEC)
    mount("tmpfs", f"{root}/dev", "tmpfs", NOSUID, "mode=755")
    for name in DEVICES:
        with open(f"{root}/dev/{name}", "wb"):
            pass
        mount(f"/dev/{name}", f"{root}/dev/{name}", None, BIND)
    for name, kind, data in (("pts", "devpts", "newinstance,ptmxmode=0666"), ("shm", "tmpfs", "mode=1777")):
        os.mkdir(f"{root}/dev/{name}")
        mount(kind, f"{root}/dev/{name}", kind, NOSUID, data)
    os.symlink("pts/ptmx", f"{root}/dev/ptmx")
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"{root}/dev/{name}")


def bring_up(interface, address=None):
    """By ioctl, since not every machine has `ip`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        if address is not None:
            packed = struct.pack("16sH2s4s8s", interface, socket.AF_INET, b"", socket.inet_aton(address), b"")
            fcntl.ioctl(control, SIOCSIFADDR, packed)
        request = struct.pack("16sH14s", interface, 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH14s", interface, flags | 1 | 0x40, b""))


def enter(settings):
    """Make these namespaces the sandbox; gives the command to run and its environment."""
    root = build_root(settings)
    bring_up(b"lo")
    bring_up(b"lo:1", settings["address"])
    build_devices(root)
    os.chroot(root)
    os.chdir(settings["workdir"])
    return settings["argv"], settings["env"]


def enter_gvisor(settings):
    """Make a gVisor in these namespaces the sandbox; gives the command that runs it."""
    root = build_root(settings)
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
    bundle = dict(settings["bundle"], root={"path": root, "readonly": False})
    network = {"type": "network", "path": f"/proc/1/fd/{cable(settings['address'], settings['gateway'])}"}
    bundle["linux"] = {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")] + [network]}
    with open(f"{settings['work']}/config.json", "w") as file:
        json.dump(bundle, file)
    run = ["run", "--bundle", settings["work"], "--pass-fd", f"{settings['ready']}:{settings['told']}", settings["id"]]
    return [*settings["runsc"], *run], dict(os.environ)


def cable(address, gateway):
    """Lay one from here into a network namespace for gVisor, which takes its end over; gives that namespace."""
    outside = os.open("/proc/self/ns/net", os.O_RDONLY)
    if LIBC.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace for gVisor")
    inside = os.open("/proc/self/ns/net", os.O_RDONLY)
    ends = ["link", "add", "eth0", "type", "veth", "peer", "name", "cable", "netns", f"/proc/1/fd/{outside}"]
    subprocess.run(["ip", *ends], check=True)
    bring_up(b"lo")
    bring_up(b"eth0", address)
    # A runsc of 2024 takes a namespace with these settings for the machine's own and refuses it; now all have them.
    mount("tmpfs", "/proc/sys/net/core", "tmpfs")
    LIBC.setns(outside, CLONE_NEWNET)
    bring_up(b"lo")
    bring_up(b"cable", gateway)
    return inside


def supervise(child):
    """Reap until the command has ended. The command's pipes are let go, else their end would never be seen."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def main():
    with open(sys.argv[1]) as file:
        settings = json.load(file)
    argv, env = enter_gvisor(settings) if "runsc" in settings else enter(settings)
    child = os.fork()
    if child == 0:
        try:
            if "runsc" not in settings:
                os.close(settings["ready"])
            os.setsid()
            os.execvpe(argv[0], argv, env)
        except OSError as problem:
            os.write(2, f"{argv[0]}: {problem.strerror}\n".encode())
            os._exit(127 if isinstance(problem, FileNotFoundError) else 126)
    if "runsc" not in settings:
        os.write(settings["ready"], b"1")
    os.close(settings["ready"])
    supervise(child)


if __name__ == "__main__":
    main()
