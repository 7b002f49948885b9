"""The layer over the host's own root that hides what tasks must not see.

When a spec names no image, the slot's root is the host's, read-only below its own layer. Programs and libraries stay
visible; home directories, scratch space, logs, sockets and files that ordinary users of the host cannot read do not.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ..host_files import remove_tree

VISIBLE = {"bin", "sbin", "lib", "lib32", "lib64", "libx32", "usr", "etc", "opt", "var"}
VISIBLE_VAR = {"lib", "cache"}
VISIBLE_VAR_LIB = {
    "dpkg", "apt", "python", "python3", "pam", "ucf", "ca-certificates", "ca-certificates-local", "gems", "rpm",
    "pacman", "apk", "alternatives", "xml-core", "sgml-base", "emacsen-common", "texmf", "gcc",
}  # fmt: skip
VISIBLE_VAR_CACHE = {"apt", "fontconfig", "man", "ldconfig"}
MODES = {"tmp": 0o1777, "root": 0o700}
OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")


def build_mask(target: str, root: str = "/") -> frozenset[str]:
    """Make the layer at `target`; returns the attributes that mark a directory as hiding the one below."""
    remove_tree(target)
    os.makedirs(target, 0o755)
    os.chmod(target, 0o755)
    _hide_others(root, target, VISIBLE)
    _copy_links(root, target)
    for name in visible_parts(root):
        os.makedirs(os.path.join(target, name), exist_ok=True)
    for name in ("tmp", "root", "home", "run", "mnt", "workspace"):
        _empty_directory(os.path.join(target, name), MODES.get(name, 0o755))
    var = os.path.join(target, "var")
    os.makedirs(var, exist_ok=True)
    _hide_others(os.path.join(root, "var"), var, VISIBLE_VAR)
    _empty_directory(os.path.join(var, "tmp"), 0o1777)
    _empty_directory(os.path.join(var, "log"), 0o755)
    for name, visible in (("lib", VISIBLE_VAR_LIB), ("cache", VISIBLE_VAR_CACHE)):
        os.makedirs(os.path.join(var, name), exist_ok=True)
        _hide_others(os.path.join(root, "var", name), os.path.join(var, name), visible)
    for private in _private_paths(root):
        _whiteout(os.path.join(target, os.path.relpath(private, root)))
    return frozenset(name for name in OPAQUE if name in os.listxattr(os.path.join(target, "tmp")))


def visible_parts(root: str = "/") -> list[str]:
    """Directories of the host's root that stay visible."""
    return sorted(
        entry.name for entry in os.scandir(root) if entry.name in VISIBLE and entry.is_dir(follow_symlinks=False)
    )


def _copy_links(root: str, target: str) -> None:
    """`/bin -> usr/bin` and its like, for slots that have the host's directories but not its root."""
    for entry in os.scandir(root):
        if entry.name in VISIBLE and entry.is_symlink():
            os.symlink(os.readlink(entry.path), os.path.join(target, entry.name))


def _hide_others(directory: str, target: str, visible: set[str]) -> None:
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        if entry.name in visible or entry.is_symlink():
            continue
        path = os.path.join(target, entry.name)
        if entry.is_dir(follow_symlinks=False):
            _empty_directory(path, MODES.get(entry.name, 0o755))
        else:
            _whiteout(path)


def _empty_directory(path: str, mode: int) -> None:
    """A directory that hides the one below it."""
    if not os.path.isdir(path):
        os.mkdir(path)
    os.chmod(path, mode)
    for name in OPAQUE:  # which of them counts depends on how the overlay is mounted; setting both needs privilege
        try:
            os.setxattr(path, name, b"y")
        except OSError:
            continue


def _whiteout(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not os.path.lexists(path):
        os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))


def _private_paths(root: str) -> Iterator[str]:
    """What "others" may not read in the places where secrets are kept."""
    for start, depth in (("etc", 8), ("opt", 3), ("usr/local/etc", 8), ("var/lib/dpkg", 1), ("var/cache", 3)):
        yield from _unreadable(os.path.join(root, start), depth)


def _unreadable(directory: str, depth: int) -> Iterator[str]:
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        try:
            mode = entry.stat(follow_symlinks=False).st_mode
        except OSError:
            continue
        if stat.S_ISLNK(mode):
            continue
        if not mode & stat.S_IROTH:
            yield entry.path
        elif stat.S_ISDIR(mode) and depth > 1:
            yield from _unreadable(entry.path, depth - 1)
