"""File requests, done inside the slot with the slot's own rights, in Python; see helper/files.c."""

from __future__ import annotations

import array
import errno
import os
import shutil
import signal
import socket
import stat

from .archive import OPAQUE, pack_tree, unpack_tree
from .config import Request, SlotConfig
from .confine import become_command


def _kind(mode: int) -> str:
    return "f" if stat.S_ISREG(mode) else "d" if stat.S_ISDIR(mode) else "l" if stat.S_ISLNK(mode) else "o"


def _stat_text(info: os.stat_result) -> str:
    return f"{_kind(info.st_mode)} {info.st_size} {stat.S_IMODE(info.st_mode):o} {info.st_mtime_ns}"


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


class Worker:
    """One request and its stream."""

    def __init__(self, sock: socket.socket, request: Request, upper: int) -> None:
        self.sock = sock
        self.request = request
        self.path = request.get("path")
        self.upper = upper
        self.layer = OPAQUE[bool(request.number("userxattr"))] if request.number("layer") else ""

    def ok(self, text: str = "") -> None:
        """A status line."""
        self.sock.sendall(f"ok {text}\n".encode() if text else b"ok\n")

    def do_stat(self) -> None:
        """lstat."""
        self.ok(_stat_text(os.lstat(self.path)))

    def do_list(self) -> None:
        """Entries, each ended by NUL."""
        entries = list(os.scandir(os.fsencode(self.path)))
        self.ok()
        for entry in entries:
            self.sock.sendall(_stat_text(entry.stat(follow_symlinks=False)).encode() + b" " + entry.name + b"\0")

    def do_remove(self) -> None:
        """A file, an empty directory, or a tree; links are not followed."""
        is_directory = stat.S_ISDIR(os.lstat(self.path).st_mode)
        if is_directory and self.request.number("recursive"):
            shutil.rmtree(self.path)
        elif is_directory:
            os.rmdir(self.path)
        else:
            os.unlink(self.path)
        self.ok()

    def do_read(self) -> None:
        """Regular files only: a FIFO or device would block or never end."""
        fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EISDIR if stat.S_ISDIR(info.st_mode) else errno.EINVAL, "")
        self.ok(str(info.st_size))
        offset, limit = self.request.number("offset"), self.request.number("length", -1)
        while limit != 0:
            data = os.pread(fd, min(limit, 65536) if limit > 0 else 65536, offset)
            if not data:
                return
            self.sock.sendall(data)
            offset += len(data)
            limit -= len(data) if limit > 0 else 0

    def do_write(self) -> None:
        """Beside the target first, then in its place."""
        os.makedirs(os.path.dirname(self.path) or "/", exist_ok=True)
        target = os.path.realpath(self.path) if os.path.islink(self.path) else self.path
        mode = 0o644
        if os.path.exists(target):
            found = os.stat(target).st_mode
            if not stat.S_ISREG(found):
                raise OSError(errno.EISDIR if stat.S_ISDIR(found) else errno.EINVAL, "")
            mode = stat.S_IMODE(found)
        mode = self.request.number("mode", mode)
        draft = f"{target}.hermes-{os.getpid()}"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._take_content(fd)
            os.fchmod(fd, mode)
            os.close(fd)
            os.rename(draft, target)
        except BaseException:
            os.unlink(draft)
            raise
        self.ok()

    def _take_content(self, fd: int) -> None:
        """A small file comes with its request; the data of a larger one is asked for."""
        if self.request.number("inline"):
            _write_all(fd, self.request.raw)
            return
        self.ok()
        size = self.request.number("size")
        while size > 0:
            data = self.sock.recv(min(size, 65536))
            if not data:
                raise OSError(errno.ECONNABORTED, "")
            size -= len(data)
            _write_all(fd, data)

    def do_listen(self) -> None:
        """A unix socket whose listening descriptor goes to the server."""
        os.makedirs(os.path.dirname(self.path) or "/", exist_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        listener.bind(self.path)
        listener.listen(64)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [listener.fileno()]))
        self.sock.sendmsg([b"ok\n"], [rights])

    def do_pack(self) -> None:
        """A tree, or a writable layer."""
        source = self.path or f"/proc/self/fd/{self.upper}"
        if not self.layer:
            os.lstat(source)
        self.ok()
        pack_tree(self.sock, os.path.realpath(source) if self.path and self.layer else source, self.layer)

    def do_unpack(self) -> None:
        """The inverse."""
        os.makedirs(self.path, exist_ok=True)
        self.ok()
        unpack_tree(self.sock, self.path, self.layer, self.request.number("owner", -1))
        self.ok()


def worker_main(request: Request, config: SlotConfig | None, upper: int) -> None:
    """Do one request; what the system refuses is reported by number."""
    sock = socket.socket(fileno=os.dup(request.fds[0]))
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.umask(0o022)
    worker = Worker(sock, request, upper)
    try:
        if config is not None and not worker.layer:
            become_command(config)
        handler = getattr(worker, f"do_{request.get('do')}", None)
        if handler is None:
            raise OSError(errno.ENOSYS, "")
        handler()
    except OSError as error:
        try:
            sock.sendall(f"error {error.errno or errno.EIO}\n".encode())
        except OSError:
            return
