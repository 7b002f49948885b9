"""Hides what strangers may not read from slots that see the host's folders with the server's own rights.

An overlay reads its layers with the rights of whoever mounted it. Where that cannot be a stranger to the host
(helper/view.c), private files get whiteouts in the view: those that are there at the start, and before a slot is leased
those that came since. inotify tells of these. An ordinary user can read no more than strangers but what it owns and
what its groups may read, and that lies below few folders: they are watched whole, /usr down to its third level.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterator, Sequence

EVERY = -1
WATCHED = (("usr", 2), ("usr/local", EVERY), ("opt", EVERY))
"""And how many levels of folders below."""
IN_ATTRIB, IN_MOVED_TO, IN_CREATE, IN_Q_OVERFLOW = 0x4, 0x80, 0x100, 0x4000
IN_ONLYDIR, IN_DONT_FOLLOW = 0x0100_0000, 0x0200_0000
EVENT = struct.Struct("iIII")
READ_SIZE = 65_536


class PrivateFiles:
    """The whiteouts of one view."""

    def __init__(self, view: str, parts: Sequence[str], root: str = "/") -> None:
        self.changes = 0
        """How often something was hidden after the start: slots built before may show it."""
        self._slot = os.path.join(view, "slot")
        self._root = root
        self._starts = [(name, levels) for name, levels in WATCHED if name.split("/")[0] in parts]
        self._parts = list(parts) if os.geteuid() == 0 else []
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watched: dict[int, tuple[str, int]] = {}
        """Path of a folder, and how many levels below it are watched."""
        self._covered: set[str] = set()
        self._unwatched = self._inotify < 0
        self._hide_all()

    def hide_new(self) -> int:
        """Hide what appeared; returns `changes`."""
        again = self._unwatched
        for watch, mask, name in self._events():
            if mask & IN_Q_OVERFLOW:
                again = True
            elif name and watch in self._watched:
                folder, levels = self._watched[watch]
                self.changes += self._look(os.path.join(folder, name), levels if mask & IN_ATTRIB else EVERY)
        if again:
            self.changes += self._hide_all()
        return self.changes

    def close(self) -> None:
        """Watch no more."""
        if self._inotify >= 0:
            os.close(self._inotify)
            self._inotify = -1

    def _hide_all(self) -> int:
        hidden = 0
        for start, levels in self._starts:
            hidden += sum(self._look(*each) for each in self._enter(os.path.join(self._root, start), levels))
        for start in self._parts:  # as root; too many folders to watch
            hidden += sum(self._cover(path) for path in _unreadable(os.path.join(self._root, start)))
        return hidden

    def _look(self, path: str, levels: int) -> int:
        """Hide it, or what is in it and so many levels of folders below; returns how much was hidden."""
        hidden, left = 0, [(path, levels)]
        while left:
            path, levels = left.pop()
            mode = _mode(path)
            if _is_private(mode):
                hidden += self._cover(path)
                continue
            if path in self._covered:
                self._uncover(path)
            if stat.S_ISDIR(mode) and levels:
                left += self._enter(path, levels - 1)
        return hidden

    def _enter(self, folder: str, levels: int) -> list[tuple[str, int]]:
        """What is in a folder, which is watched from now on."""
        self._watch(folder, levels)  # before it is read: what comes meanwhile is told
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            return [(entry.path, levels) for entry in entries]
        return []

    def _watch(self, path: str, levels: int) -> None:
        mask = IN_CREATE | IN_MOVED_TO | IN_ATTRIB | IN_ONLYDIR | IN_DONT_FOLLOW
        watch = self._libc.inotify_add_watch(self._inotify, os.fsencode(path), mask)
        if watch >= 0:
            self._watched[watch] = (path, levels)
        elif ctypes.get_errno() not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES):
            self._unwatched = True  # no more watches for this user: look everywhere each time

    def _events(self) -> Iterator[tuple[int, int, str]]:
        while self._inotify >= 0:
            try:
                data = os.read(self._inotify, READ_SIZE)
            except BlockingIOError:
                return
            position = 0
            while position < len(data):
                watch, mask, _, length = EVENT.unpack_from(data, position)
                position += EVENT.size
                yield watch, mask, os.fsdecode(data[position : position + length].rstrip(b"\0"))
                position += length

    def _in_view(self, path: str) -> str:
        return os.path.join(self._slot, os.path.relpath(path, self._root))

    def _cover(self, path: str) -> int:
        covered = self._in_view(path)
        if os.path.lexists(covered):
            return 0
        os.makedirs(os.path.dirname(covered), exist_ok=True)
        os.mknod(covered, stat.S_IFCHR, os.makedev(0, 0))
        self._covered.add(path)
        return 1

    def _uncover(self, path: str) -> None:
        """What was private while it was being written, and is not any more."""
        self._covered.remove(path)
        os.unlink(self._in_view(path))


def _unreadable(start: str) -> Iterator[str]:
    """What strangers may not read; not what lies in it. A system has 100,000 files: os.walk takes twice as long."""
    folders = [start]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_symlink():
                    continue
                mode = _mode(entry.path)
                if _is_private(mode):
                    yield entry.path
                elif stat.S_ISDIR(mode):
                    folders.append(entry.path)


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:  # it went away
        return stat.S_IFREG | stat.S_IROTH


def _is_private(mode: int) -> bool:
    """Whether strangers may not read it; a folder that they cannot enter has nothing for them."""
    return not mode & stat.S_IROTH or (stat.S_ISDIR(mode) and not mode & stat.S_IXOTH)
