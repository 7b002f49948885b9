"""Unpacks one layer of an image, a tar stream, into a folder that overlayfs takes as a lower layer.

A layer comes from anywhere, so all of it is suspect. Everything is done below a descriptor of the folder: a name with
`..`, and a name behind a link that leads out of the layer, is refused, and so is more than `Limits` allows. A whiteout
becomes a device 0:0, an opaque folder gets overlayfs's attribute. Names are bytes, as in the kernel.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

from .inflate import Inflated
from .layer_archive import Archive, Entry, LayerRefused, Limits, Parts, Pieces, path_parts

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FOLDERS = 256
LINKS_FOLLOWED = 40
USUAL_IDS = 65_536
WHITEOUT = b".wh."
OPAQUE = b".wh..wh..opq"
IGNORED_ATTRIBUTE = (errno.ENOTSUP, errno.EPERM, errno.EINVAL)
"""Attributes that this file system or this user cannot set are left out, as engines do."""


class Unpacker:
    """Writes entries below one folder. As root of a user namespace what only the host's root may do is left out."""

    def __init__(
        self, root: int, pieces: Pieces, limits: Limits, overlay: str, *, one_user: bool, devices: bool
    ) -> None:
        self._root = root
        self._pieces = pieces
        self._limits = limits
        self._opaque = f"{overlay}.overlay.opaque"
        self._one_user = one_user
        """Only one id can be given to files: others' become ours, as engines without id ranges have it."""
        self._devices = devices
        self._archive = Archive(pieces, limits)
        self._open: dict[Parts, int] = {}
        self._real: dict[Parts, Parts] = {}
        """Where open folders are whose names lead through links."""
        self._folder_times: dict[Parts, int] = {}
        self._current: Parts = ()
        self._set_group_seen = False
        self.implied: set[Parts] = set()
        """Folders that something was put into and that no entry names."""
        self.links: dict[Parts, Parts] = {}
        """Hard links to files that layers below must have."""
        self.whiteouts: dict[Parts, set[bytes]] = {}
        """By their folders."""
        self.root = ""
        """What the layer says of the image's root: nothing, that it is `plain`, or that it has modes of its `own`."""
        self.high_ids: set[int] = set()
        """Owners beyond the ids that a slot has anyway."""
        self._ids = os.geteuid(), os.getegid()
        self.entries = self.bytes = 0

    def run(self) -> None:
        """All entries; the stream is then at its end."""
        try:
            for entry in self._archive:
                self._count(entry)
                self._take(entry)
                if len(self._open) > OPEN_FOLDERS:
                    self._close_folders()
            self._pieces.drain()
            self._drop_idle_whiteouts()
            for parts, mtime_ns in reversed(self._folder_times.items()):
                with contextlib.suppress(LayerRefused, OSError):
                    os.utime(self._folder(parts), ns=(mtime_ns, mtime_ns))
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise LayerRefused(f"an entry cannot be made: {error.strerror} {error.filename!r}") from error
        finally:
            self._close_folders()

    def _count(self, entry: Entry) -> None:
        self.entries += 1
        self.bytes += entry.size
        if self.entries > self._limits.entries:
            raise LayerRefused(f"more than {self._limits.entries} entries in one layer")
        if self.bytes > self._limits.bytes:
            raise LayerRefused(f"more than {self._limits.bytes >> 20} MiB in one layer")

    def _take(self, entry: Entry) -> None:
        parts = path_parts(entry.name)
        if len(parts) > self._limits.depth or len(entry.name) > self._limits.path:
            raise LayerRefused(f"a path of {len(parts)} folders and {len(entry.name)} bytes")
        if not parts:
            if entry.kind == b"5":
                self._dress(self._root, entry)
                self._folder_times[()] = entry.mtime_ns
                is_plain = (entry.mode, entry.uid, entry.gid, entry.attributes) == (0o755, 0, 0, {})
                self.root = "plain" if is_plain else "own"
            return
        self._current = parts
        parent, name = self._folder(parts[:-1]), parts[-1]
        if name.startswith(WHITEOUT):
            self._white_out(parent, name)
            return
        self.links.pop(parts, None)
        if entry.kind in b"0\x007S":
            self._file(parent, name, entry)
        elif entry.kind == b"5":
            self._make_folder(parent, parts, entry)
        elif entry.kind == b"1":
            self._hard_link(parent, name, entry)
        elif entry.kind in b"2346":
            self._special(parent, name, entry)
        else:
            raise LayerRefused(f"an entry of unknown kind {entry.kind!r}")

    def _folder(self, parts: Parts, followed: int = 0, *, make: bool = True) -> int:
        """A descriptor of the folder, made where it is missing."""
        if not parts:
            return self._root
        fd = self._open.get(parts)
        if fd is None:
            fd = self._enter(self._folder(parts[:-1], followed, make=make), parts, followed, make)
            self._open[parts] = fd
        return fd

    def _enter(self, parent: int, parts: Parts, followed: int, make: bool) -> int:
        name = parts[-1]
        if parts[:-1] in self._real:
            self._real[parts] = (*self._real[parts[:-1]], name)
            if len(self._real[parts]) > self._limits.depth:
                raise LayerRefused(f"a path of {len(self._real[parts])} folders behind links")
        try:
            return os.open(name, FOLDER, dir_fd=parent)
        except FileNotFoundError:
            if not make:
                raise
            os.mkdir(name, 0o755, dir_fd=parent)
            self.implied.add(self._real.get(parts, parts))
            return os.open(name, FOLDER, dir_fd=parent)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
        info = os.lstat(name, dir_fd=parent)
        if _is_whiteout(info) and make:
            return self._replace_whiteout(parent, name)
        if not stat.S_ISLNK(info.st_mode):
            raise LayerRefused(f"an entry below {_shown(parts)}, which is not a folder")
        self._real[parts] = self._follow(parts, os.readlink(name, dir_fd=parent), followed)
        return os.dup(self._folder(self._real[parts]))

    def _follow(self, parts: Parts, target: bytes, followed: int) -> Parts:
        """The folder that a link leads to, seen from the image's root: one of the layer, or one below the link."""
        strict = target.startswith(b"/") or b".." in target.split(b"/")
        reached = () if target.startswith(b"/") else self._real.get(parts[:-1], parts[:-1])
        for name in target.split(b"/"):
            if name in (b"", b"."):
                continue
            if followed >= LINKS_FOLLOWED or (name == b".." and not reached):
                raise self._leads_elsewhere(parts)
            if name == b"..":
                reached = reached[:-1]
                continue
            try:
                self._folder((*reached, name), followed + 1, make=not strict)
            except FileNotFoundError:
                raise self._leads_elsewhere(parts) from None
            reached = self._real.get((*reached, name), (*reached, name))
        return reached

    @staticmethod
    def _leads_elsewhere(parts: Parts) -> LayerRefused:
        return LayerRefused(f"an entry behind the link {_shown(parts)}, which leads elsewhere")

    def _replace_whiteout(self, parent: int, name: bytes) -> int:
        os.unlink(name, dir_fd=parent)
        os.mkdir(name, 0o755, dir_fd=parent)
        fd = os.open(name, FOLDER, dir_fd=parent)
        os.setxattr(fd, self._opaque, b"y")
        return fd

    def _close_folders(self) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()
        self._real.clear()

    def _white_out(self, parent: int, name: bytes) -> None:
        if name == OPAQUE:
            os.setxattr(parent, self._opaque, b"y")
            return
        hidden = name[len(WHITEOUT) :]
        if hidden.startswith(WHITEOUT):
            return  # records of aufs
        if hidden in (b"", b".", b".."):
            raise LayerRefused(f"a whiteout of {hidden!r}")
        try:
            info = os.lstat(hidden, dir_fd=parent)
        except FileNotFoundError:
            try:
                os.mknod(hidden, stat.S_IFCHR | 0o600, os.makedev(0, 0), dir_fd=parent)
            except PermissionError:
                raise OSError(errno.ENOSPC, "this file system takes no whiteouts; keep images elsewhere") from None
            folder = self._current[:-1]
            self.whiteouts.setdefault(self._real.get(folder, folder), set()).add(hidden)
            return
        # What this layer itself brings stays; only what lies below it is hidden.
        if stat.S_ISDIR(info.st_mode):
            fd = os.open(hidden, FOLDER, dir_fd=parent)
            try:
                os.setxattr(fd, self._opaque, b"y")
            finally:
                os.close(fd)

    def _drop_idle_whiteouts(self) -> None:
        """Below an opaque folder there is nothing to hide, and a whiteout of nothing is listed as a broken name."""
        for parts in list(self.whiteouts):
            try:
                opaque = any(self._is_opaque(self._folder(parts[:n], make=False)) for n in range(len(parts) + 1))
                for name in self.whiteouts[parts] if opaque else ():
                    if _is_whiteout(os.lstat(name, dir_fd=self._folder(parts, make=False))):
                        os.unlink(name, dir_fd=self._folder(parts, make=False))
            except (FileNotFoundError, LayerRefused):  # replaced by a later entry
                opaque = True
            if opaque:
                del self.whiteouts[parts]

    def _is_opaque(self, folder: int) -> bool:
        with contextlib.suppress(OSError):
            return os.getxattr(folder, self._opaque) == b"y"
        return False

    def _file(self, parent: int, name: bytes, entry: Entry) -> None:
        try:
            fd = os.open(name, NEW_FILE, 0o600, dir_fd=parent)
        except FileExistsError:
            self._clear(parent, name)
            fd = os.open(name, NEW_FILE, 0o600, dir_fd=parent)
        try:
            if entry.sparse is None:
                self._pieces.write_to(fd, entry.size)
            else:
                self._write_sparse(fd, entry)
            self._archive.left -= entry.size
            self._dress(fd, entry)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)

    def _write_sparse(self, fd: int, entry: Entry) -> None:
        left = entry.size
        for offset, length in entry.sparse or ():
            if length > left or offset < 0 or length < 0 or offset + length > entry.real_size:
                raise LayerRefused("the map of a sparse file does not fit its data")
            os.lseek(fd, offset, os.SEEK_SET)
            self._pieces.write_to(fd, length)
            left -= length
        self._pieces.skip(left)
        os.ftruncate(fd, entry.real_size)

    def _make_folder(self, parent: int, parts: Parts, entry: Entry) -> None:
        name = parts[-1]
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            info = os.lstat(name, dir_fd=parent)
            if _is_whiteout(info):
                os.close(self._replace_whiteout(parent, name))
            elif not stat.S_ISDIR(info.st_mode):
                self._clear(parent, name)
                os.mkdir(name, 0o755, dir_fd=parent)
        self._dress(self._folder(parts), entry)
        self._folder_times[parts] = entry.mtime_ns
        self.implied.discard(parts)

    def _hard_link(self, parent: int, name: bytes, entry: Entry) -> None:
        target = path_parts(entry.link)
        if not target:
            raise LayerRefused("a hard link to the root")
        try:
            other = self._folder(target[:-1], make=False)
            if other == parent and target[-1] == name:
                return
            try:
                os.link(target[-1], name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
            except FileExistsError:
                os.lstat(target[-1], dir_fd=other)  # only then
                self._clear(parent, name)
                other = self._folder(target[:-1], make=False)
                os.link(target[-1], name, src_dir_fd=other, dst_dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError):
                self._clear(parent, name)
            self.links[self._current] = self.links.get(target, target)

    def _special(self, parent: int, name: bytes, entry: Entry) -> None:
        if entry.kind in b"34" and not self._devices:
            return
        try:
            self._make_special(parent, name, entry)
        except FileExistsError:
            self._clear(parent, name)
            self._make_special(parent, name, entry)
        if self._must_own(entry):
            with self._owner_errors(entry):
                os.chown(name, entry.uid, entry.gid, dir_fd=parent, follow_symlinks=False)
        path = os.path.join(b"/proc/self/fd/%d" % parent, name)
        if entry.kind != b"2":
            os.chmod(path, entry.mode)
        for key, value in entry.attributes.items():
            self._set_attribute(path, key, value)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=parent, follow_symlinks=False)

    @staticmethod
    def _make_special(parent: int, name: bytes, entry: Entry) -> None:
        if entry.kind == b"2":
            os.symlink(entry.link, name, dir_fd=parent)
        else:
            kind = {b"3": stat.S_IFCHR, b"4": stat.S_IFBLK, b"6": stat.S_IFIFO}[entry.kind]
            os.mknod(name, kind | 0o600, entry.device, dir_fd=parent)

    def _dress(self, fd: int, entry: Entry) -> None:
        """Owner, mode and attributes, in the order in which one does not undo the other."""
        if self._must_own(entry):
            with self._owner_errors(entry):
                os.fchown(fd, entry.uid, entry.gid)
        os.fchmod(fd, entry.mode)
        if entry.kind == b"5" and entry.mode & stat.S_ISGID:
            self._set_group_seen = True
        for key, value in entry.attributes.items():
            self._set_attribute(fd, key, value)

    def _must_own(self, entry: Entry) -> bool:
        self.high_ids.update(number for number in (entry.uid, entry.gid) if number >= USUAL_IDS)
        return (entry.uid, entry.gid) != self._ids or self._set_group_seen

    @contextlib.contextmanager
    def _owner_errors(self, entry: Entry) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EPERM):
                raise
            if not self._one_user:
                owner = f"{entry.uid}:{entry.gid}, whose ids this user of the host may not use (see /etc/subuid)"
                raise LayerRefused(f"{os.fsdecode(entry.name)[:200]!r} belongs to {owner}") from None

    def _set_attribute(self, where: int | bytes, key: bytes, value: bytes) -> None:
        if b".overlay." in key:
            return  # would tell our own overlay what to show
        try:
            os.setxattr(where, key, value, follow_symlinks=isinstance(where, int))
        except OSError as error:
            if error.errno not in IGNORED_ATTRIBUTE:
                raise

    def _clear(self, parent: int, name: bytes) -> None:
        """A later entry of the same name replaces an earlier one."""
        mode = os.lstat(name, dir_fd=parent).st_mode
        if stat.S_ISDIR(mode):
            keep = os.dup(parent)
            try:
                _remove_folder(keep, name)
            finally:
                os.close(keep)
            here = self._current
            self.implied = {parts for parts in self.implied if parts[: len(here)] != here}
            self.links = {parts: target for parts, target in self.links.items() if parts[: len(here)] != here}
            self._folder_times = {
                parts: time for parts, time in self._folder_times.items() if parts[: len(here)] != here
            }
        else:
            os.unlink(name, dir_fd=parent)
        if stat.S_ISDIR(mode) or stat.S_ISLNK(mode):  # open folders may have been reached through it, by any name
            for parts in [parts for parts, fd in self._open.items() if fd != parent]:
                os.close(self._open.pop(parts))
                self._real.pop(parts, None)


def _shown(parts: Parts) -> str:
    return repr(os.fsdecode(b"/".join(parts))[:200])


def _is_whiteout(info: os.stat_result) -> bool:
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _remove_folder(parent: int, name: bytes) -> None:
    fd = os.open(name, FOLDER, dir_fd=parent)
    try:
        with os.scandir(fd) as entries:
            found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
        for child, is_folder in found:
            if is_folder:
                _remove_folder(fd, child)
            else:
                os.unlink(child, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)


def unpack_layer(
    source: BinaryIO,
    target: str,
    *,
    digest: str | None,
    diff_id: str,
    limits: Limits,
    overlay: str,
    one_user: bool = False,
    devices: bool = True,
) -> Unpacker:
    """Unpack a blob into an empty folder. `digest` is the blob's, `diff_id` that of the plain archive in it."""
    inflated = Inflated(source)
    root = os.open(target, FOLDER)
    try:
        pieces = Pieces(iter(inflated), limits.bytes)
        work = Unpacker(root, pieces, limits, overlay, one_user=one_user, devices=devices)
        work.run()
    finally:
        os.close(root)
        inflated.close()
    for name, wanted, found in (("blob", digest, inflated.packed), ("layer", diff_id, inflated.plain)):
        if wanted is not None and wanted != f"sha256:{found.hexdigest()}":
            raise LayerRefused(f"the {name} {wanted[:23]}... has the digest sha256:{found.hexdigest()[:16]}...")
    return work
