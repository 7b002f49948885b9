"""Folders on the host that nobody else can change, and the removal of trees that an agent made.

Both work on descriptors, so that a path that another user or an agent changes meanwhile leads nowhere else. Part of the
packed server: standard library, Python 3.9.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import shutil
import stat
from dataclasses import dataclass, field
from typing import Union

AnyPath = Union[str, "os.PathLike[str]"]
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
TRIES = 20
"""How often a folder is emptied while something still writes into it."""

MOST_PROBLEMS = 5


class NotPrivate(PermissionError):
    """Another user could change what is in this folder; the message says why."""

    def __str__(self) -> str:
        return str(self.args[0])


def user_name(uid: int) -> str:
    """For messages; the number where the user has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


def open_private(path: AnyPath, mode: int = 0o700, *, may_be_link: bool = False) -> int:
    """A descriptor of the folder, made if need be; `NotPrivate` unless it and the way to it are this user's alone.

    With `may_be_link` a link that this user or root made is followed: people move their state to a larger disk so.
    """
    place = os.path.abspath(path)
    real = os.path.realpath(place) if may_be_link and _own_link(place) else place
    os.makedirs(os.path.dirname(real), mode=0o700, exist_ok=True)
    for parent in dict.fromkeys((os.path.dirname(place), os.path.dirname(real))):
        _check_way(parent, place)
    with contextlib.suppress(FileExistsError):
        os.mkdir(real, mode)
    try:
        fd = os.open(real, FOLDER)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotPrivate(f"{place} is not a folder (or a link that is not followed)") from None
        raise
    try:
        _check_folder(os.fstat(fd), fd, place)
        if os.fstat(fd).st_mode & 0o777 & ~mode and not may_be_link:
            os.fchmod(fd, mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_private(path: AnyPath) -> bool:
    """Whether there is such a folder; `NotPrivate` when others could change it, or put one there. Makes nothing."""
    place = os.path.abspath(path)
    _check_way(os.path.dirname(place), place)
    try:
        info = os.lstat(place)
    except FileNotFoundError:
        return False
    _check_folder(info, place, place)
    return True


def _own_link(place: str) -> bool:
    try:
        info = os.lstat(place)
    except FileNotFoundError:
        return True
    return not stat.S_ISLNK(info.st_mode) or info.st_uid in (0, os.geteuid())


def _others_write(info: os.stat_result, folder: int | str) -> bool:
    """Everybody, a group that is not ours, or users of a list (an ACL), whose rights show as those of the group."""
    by_group = info.st_mode & 0o020 and (info.st_gid not in (0, os.getegid()) or _has_list(folder))
    return bool(info.st_mode & 0o002 or by_group)


def _has_list(folder: int | str) -> bool:
    if not hasattr(os, "listxattr"):
        return False
    try:
        return "system.posix_acl_access" in os.listxattr(folder)
    except OSError:
        return False


def _check_folder(info: os.stat_result, folder: int | str, place: str) -> None:
    if not stat.S_ISDIR(info.st_mode):
        raise NotPrivate(f"{place} is not a folder")
    if info.st_uid != os.geteuid():
        owner, me = user_name(info.st_uid), user_name(os.geteuid())
        raise NotPrivate(f"{place} belongs to {owner}, not to {me} (a folder of yours in it would do)")
    if _others_write(info, folder):
        raise NotPrivate(f"others can write in {place}; `chmod go-w` it if it is yours")


def _check_way(parent: str, place: str) -> None:
    """No folder on the way to a folder of root may let others rename what is in it, or belong to another user.

    Others are not asked for that: volumes of Kubernetes are open to all, and groups share scratch space of their head.
    """
    if os.geteuid() != 0:
        return
    trusted = {0, os.stat("/").st_uid}
    way = os.path.realpath(parent)
    while True:
        info = os.stat(way)
        sticky = info.st_mode & stat.S_ISVTX
        if _others_write(info, way) and not sticky:
            raise NotPrivate(f"{place} is not safe: others can rename what is in {way} (`chmod +t` or `go-w` helps)")
        if info.st_uid not in trusted:
            raise NotPrivate(f"{place} is not safe for root: {way} belongs to {user_name(info.st_uid)}")
        if way == "/":
            return
        way = os.path.dirname(way)


@dataclass
class _Level:
    """A folder on the way down: its name in its parent, what it is, and the folders in it that are still to go."""

    name: str
    identity: tuple[int, int]
    inside: list[str] = field(default_factory=list)
    tries: int = 0


def remove_tree(path: AnyPath) -> list[str]:
    """Remove a file or a tree of any depth, whatever its modes; returns what could not be removed.

    Never follows a link, never enters another mount, holds three descriptors at most. Blocks: not for an event loop.
    """
    place = os.path.abspath(path)
    if not hasattr(os, "O_PATH"):
        return _removed_by_shutil(place)
    try:
        parent = os.open(os.path.dirname(place), os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"{place}: {os.strerror(error.errno or 0)}"]
    try:
        return _Removal(parent, os.path.basename(place), place).run()
    finally:
        os.close(parent)


def _removed_by_shutil(place: str) -> list[str]:
    """For clients on other systems than Linux, which have no slots and so no trees made to resist."""
    problems: list[str] = []
    if os.path.isdir(place) and not os.path.islink(place):
        shutil.rmtree(place, onerror=lambda _, at, error: problems.append(f"{at}: {error[1]}"))
    elif os.path.lexists(place):
        os.unlink(place)
    return problems[:MOST_PROBLEMS]


class _Removal:
    """One descent. Only the folder it is in is open; the way back is `..`, compared with what it came through."""

    def __init__(self, parent: int, name: str, place: str) -> None:
        self._parent = parent
        self._name = name
        self._place = place
        self._mount = _mount_of(parent)
        self._levels: list[_Level] = []
        self._kept: set[tuple[tuple[int, int], str]] = set()
        self._not_empty: set[tuple[int, int]] = set()
        """Folders with something that is kept."""
        self.problems: list[str] = []

    def run(self) -> list[str]:
        here = self._enter(self._parent, self._name)
        try:
            while here is not None and self._levels:
                here = self._step(here)
        finally:
            if here is not None:
                os.close(here)
        return self.problems

    def _step(self, here: int) -> int | None:
        """Go one folder down, or remove this one from the one above; the folder that is current then."""
        level = self._levels[-1]
        if not level.inside:
            level.inside = self._empty(here, level)
        while level.inside:
            below = self._enter(here, level.inside.pop())
            if below is not None:
                os.close(here)
                return below
        return self._leave(here)

    def _enter(self, folder: int, name: str) -> int | None:
        """Remove what is no folder; open what is one."""
        above = self._levels[-1].identity if self._levels else (0, 0)
        try:
            found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._keep(above, name, error)
            return None
        try:
            info = os.fstat(found)
            if not stat.S_ISDIR(info.st_mode):
                os.unlink(name, dir_fd=folder)
                return None
            if _mount_of(found) != self._mount:
                raise OSError(errno.EBUSY, "another file system is mounted there")
            if info.st_mode & 0o700 != 0o700:
                with contextlib.suppress(PermissionError):  # root needs no mode, others learn it below
                    os.chmod(f"/proc/self/fd/{found}", 0o700)
            opened = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._keep(above, name, error)
            return None
        finally:
            os.close(found)
        self._levels.append(_Level(name, (info.st_dev, info.st_ino)))
        return opened

    def _empty(self, here: int, level: _Level) -> list[str]:
        """Remove all but folders; the names of those, without the ones that cannot be removed."""
        folders = []
        with contextlib.suppress(FileNotFoundError), os.scandir(here) as entries:
            for entry in entries:
                if (level.identity, entry.name) in self._kept:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                    continue
                try:
                    os.unlink(entry.name, dir_fd=here)
                except FileNotFoundError:
                    continue
                except OSError as error:
                    self._keep(level.identity, entry.name, error)
        return folders

    def _leave(self, here: int) -> int | None:
        """Remove the current folder from the one above, which becomes the current one."""
        level = self._levels[-1]
        above = self._levels[-2] if len(self._levels) > 1 else None
        up = os.dup(self._parent) if above is None else os.open("..", FOLDER, dir_fd=here)
        info = os.fstat(up)
        if above is not None and (info.st_dev, info.st_ino) != above.identity:
            os.close(up)
            self._say(level.name, "was moved away while it was being removed")
            self._levels.clear()
            return here
        try:
            os.rmdir(level.name, dir_fd=up)
        except FileNotFoundError:
            pass
        except OSError as error:
            level.tries += 1
            written = error.errno == errno.ENOTEMPTY and level.tries < TRIES
            if written and level.identity not in self._not_empty:
                os.close(up)
                return here
            self._keep((0, 0) if above is None else above.identity, level.name, error)
        self._levels.pop()
        os.close(here)
        return up

    def _keep(self, folder: tuple[int, int], name: str, error: OSError) -> None:
        """It stays, and is not tried again."""
        self._kept.add((folder, name))
        self._not_empty.add(folder)
        # A folder that is not empty only because of something already told of needs no line of its own.
        if error.errno != errno.ENOTEMPTY or not self.problems:
            self._say(name, error.strerror or type(error).__name__)

    def _say(self, name: str, why: str) -> None:
        where = "" if name == self._name else f" ({name[:100]!r} in it)"
        if len(self.problems) < MOST_PROBLEMS:
            self.problems.append(f"{self._place}{where}: {why}")


def _mount_of(fd: int) -> str:
    """The kernel's number of the mount a descriptor is on: tells bind mounts apart, which device numbers do not."""
    with open(f"/proc/self/fdinfo/{fd}") as file:
        for line in file:
            if line.startswith("mnt_id:"):
                return line.split()[1]
    return ""
