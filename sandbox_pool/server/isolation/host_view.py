"""What slots see of the host's own root, when a spec names no image: an allow-list, never "all but".

A folder `slot` is the root that slots start from. What is small is copied into it once: /etc, and parts of /var.
Programs, libraries and package databases are shown through it (`parts`). Nothing else of the host has a name in a slot,
and what is created on the host later gets none. Copied is only what every user of the host may read.

Where the server may mount as root, the parts are shown by an overlay whose owner is a stranger to the host
(helper/view.c): the kernel then refuses what a stranger may not read, however deep it lies and whenever it appears.
Elsewhere what must not be read is hidden in the view (private_files.py).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat

from ..host_files import remove_tree

TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "opt")
DATABASES = ("var/lib/dpkg", "var/lib/apt", "var/lib/rpm", "var/lib/pacman", "var/lib/apk", "var/lib/gems")
COPIED = ("etc", *(f"var/lib/{name}" for name in (
    "python", "python3", "pam", "ucf", "ca-certificates", "ca-certificates-local", "alternatives", "xml-core",
    "sgml-base", "emacsen-common", "texmf", "gcc",
)), *(f"var/cache/{name}" for name in ("fontconfig", "man", "ldconfig")))  # fmt: skip
EMPTY = {
    "tmp": 0o1777, "home": 0o755, "run": 0o755, "mnt": 0o755, "media": 0o755, "srv": 0o755, "workspace": 0o755,
    "dev": 0o755, "proc": 0o555, "sys": 0o555, "var/tmp": 0o1777, "var/log": 0o755,
}  # fmt: skip
COPY_LIMIT = 64 << 20
REDIRECT = "trusted.overlay.redirect"


def build_view(target: str, root: str = "/") -> list[str]:
    """Make `target/slot`; returns the parts of the host that are shown through it."""
    if problems := remove_tree(target):
        raise OSError("; ".join(problems))
    slot = os.path.join(target, "slot")
    os.makedirs(slot, 0o755)
    for path in (target, slot):
        os.chmod(path, 0o755)
    for name, mode in EMPTY.items():
        os.makedirs(os.path.join(slot, name), exist_ok=True)
        os.chmod(os.path.join(slot, name), mode)
    left = COPY_LIMIT
    for name in COPIED:
        left = _copy_readable(os.path.join(root, name), os.path.join(slot, name), left)
    parts = []
    for name in (*TOP, *DATABASES):
        host = os.path.join(root, name)
        if os.path.islink(host):
            os.symlink(os.readlink(host), os.path.join(slot, name))  # /bin -> usr/bin and its like
        elif os.path.isdir(host):
            os.makedirs(os.path.join(slot, name))
            with contextlib.suppress(OSError):  # only root may set it, and only an overlay made by root reads it
                os.setxattr(os.path.join(slot, name), REDIRECT, f"/{name}".encode())
            parts.append(name)
    return parts


def _copy_readable(source: str, target: str, left: int) -> int:
    """Copy what strangers may read, up to `left` bytes; returns how many are left."""
    for directory, names, files in os.walk(source):
        inside = os.path.normpath(os.path.join(target, os.path.relpath(directory, source)))
        try:
            info = os.stat(directory)
        except OSError:  # it went away
            names.clear()
            continue
        if not info.st_mode & stat.S_IROTH or not info.st_mode & stat.S_IXOTH:
            names.clear()
            continue
        os.makedirs(inside, exist_ok=True)
        _take_attributes(inside, info)
        for name in [*files, *(name for name in names if os.path.islink(os.path.join(directory, name)))]:
            left -= _copy_entry(os.path.join(directory, name), os.path.join(inside, name), left)
    return left


def _copy_entry(path: str, copy: str, left: int) -> int:
    """One file or link; returns how many bytes it took."""
    try:
        info = os.lstat(path)
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(path), copy)
            return 0
        if not stat.S_ISREG(info.st_mode) or not info.st_mode & stat.S_IROTH or info.st_size > left:
            return 0
        shutil.copyfile(path, copy)
    except OSError:  # it went away, or even we may not read it
        return 0
    _take_attributes(copy, info)
    return info.st_size


def _take_attributes(path: str, info: os.stat_result) -> None:
    if os.geteuid() == 0:
        os.chown(path, info.st_uid, info.st_gid)
    os.chmod(path, stat.S_IMODE(info.st_mode) & 0o1777)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
