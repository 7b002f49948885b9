"""Trees as a stream of records, in Python; see helper/archive.c and PROTOCOL.md."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct

RECORD = struct.Struct("<BIIIqQH")
OPAQUE = {False: "trusted.overlay.opaque", True: "user.overlay.opaque"}
"""By whether the overlay is mounted with `userxattr`; the other one is data that copy-up carries along."""


def _record(kind: str, info: os.stat_result, path: bytes, size: int) -> bytes:
    mode = stat.S_IMODE(info.st_mode)
    return RECORD.pack(ord(kind), mode, info.st_uid, info.st_gid, info.st_mtime_ns, size, len(path)) + path


def _is_opaque(path: bytes, attribute: str) -> bool:
    try:
        return os.getxattr(path, attribute, follow_symlinks=False) == b"y"
    except OSError:
        return False


def pack_tree(sock: socket.socket, root: str, layer: str) -> None:
    """Send everything at `root`; what vanishes meanwhile is left out. `layer` names the attribute of opaque directories
    when the tree is a layer, and is empty when it is not."""
    base = os.fsencode(root) + (b"/." if layer else b"")
    _pack(sock, base, b"", layer)
    sock.sendall(RECORD.pack(ord("e"), 0, 0, 0, 0, 0, 0))


def _pack(sock: socket.socket, path: bytes, name: bytes, layer: str) -> None:
    try:
        info = os.lstat(path)
        entries = sorted(os.listdir(path)) if stat.S_ISDIR(info.st_mode) else []
    except OSError:
        return
    if stat.S_ISLNK(info.st_mode):
        target = os.readlink(path)
        sock.sendall(_record("l", info, name, len(target)) + target)
    elif layer and stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
        sock.sendall(_record("w", info, name, 0))
    elif stat.S_ISREG(info.st_mode):
        _pack_file(sock, path, name, info)
    elif stat.S_ISDIR(info.st_mode):
        sock.sendall(_record("o" if layer and _is_opaque(path, layer) else "d", info, name, 0))
        for entry in entries:
            _pack(sock, path + b"/" + entry, name + b"/" + entry if name else entry, layer)


def _pack_file(sock: socket.socket, path: bytes, name: bytes, info: os.stat_result) -> None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return
    sock.sendall(_record("f", info, name, info.st_size))
    left = info.st_size
    while left > 0:
        data = os.read(fd, min(left, 65536)) or bytes(min(left, 65536))
        sock.sendall(data)
        left -= len(data)
    os.close(fd)


class _Input:
    def __init__(self, sock: socket.socket) -> None:
        self._file = sock.makefile("rb", 1 << 16)

    def exactly(self, size: int) -> bytes:
        data: bytes = self._file.read(size)
        if len(data) < size:
            raise OSError(errno.ECONNABORTED, "")
        return data


def unpack_tree(sock: socket.socket, root: str, layer: str, owner: int) -> None:
    """Read to the end even after an error, so that the sender is told instead of cut off."""
    stream = _Input(sock)
    problem: OSError | None = None
    directories: list[tuple[bytes, tuple[int, ...]]] = []
    while True:
        kind, *numbers, size, length = RECORD.unpack(stream.exactly(RECORD.size))
        if kind == ord("e"):
            break
        name = stream.exactly(length)
        path = os.fsencode(root) + (b"/" + name if name else b"")
        try:
            _check(root, name)
            _make(stream, chr(kind), path, size, layer)
            if chr(kind) in "do":
                directories.append((path, tuple(numbers)))
            elif kind != ord("w"):
                _attributes(path, tuple(numbers), layer, owner, kind == ord("l"))
        except OSError as error:
            if error.errno == errno.ECONNABORTED:
                raise
            problem = problem or error
    for path, values in reversed(directories):
        _attributes(path, values, layer, owner, False)
    if problem is not None:
        raise problem


def _check(root: str, name: bytes) -> None:
    """No way up, no way through a link."""
    path = os.fsencode(root)
    parts = name.split(b"/") if name else []
    if any(part in (b"", b".", b"..") for part in parts):
        raise OSError(errno.EINVAL, "")
    for part in parts[:-1]:
        path += b"/" + part
        if os.path.islink(path):
            raise OSError(errno.ENOTDIR, "")


def _make(stream: _Input, kind: str, path: bytes, size: int, layer: str) -> None:
    if kind == "f":
        _make_file(stream, path, size)
    elif kind == "l":
        target = stream.exactly(size)
        if os.path.lexists(path):
            os.unlink(path)
        os.symlink(target, path)
    elif kind in "do":
        if os.path.islink(path):
            raise OSError(errno.ENOTDIR, "")
        os.makedirs(path, exist_ok=True)
        if kind == "o":
            os.setxattr(path, layer, b"y")
    elif kind == "w" and layer:
        os.mknod(path, stat.S_IFCHR, 0)
    else:
        raise OSError(errno.ECONNABORTED, "")


def _make_file(stream: _Input, path: bytes, size: int) -> None:
    problem: OSError | None = None
    fd = -1
    try:
        if os.path.lexists(path):
            os.unlink(path)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        problem = error
    while size > 0:
        data = stream.exactly(min(size, 65536))
        size -= len(data)
        try:
            if problem is None:
                os.write(fd, data)
        except OSError as error:
            problem = error
    if fd >= 0:
        os.close(fd)
    if problem is not None:
        raise problem


def _attributes(path: bytes, values: tuple[int, ...], layer: str, owner: int, link: bool) -> None:
    mode, uid, gid, mtime_ns = values
    if layer and os.geteuid() == 0:
        os.lchown(path, owner if owner >= 0 else uid, owner if owner >= 0 else gid)
    if not link:
        os.chmod(path, mode & 0o7777)
    os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)
