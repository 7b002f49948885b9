"""What the layers of an image say only together, as one more layer on top of them.

A layer may put files into a folder that only a layer below it names. Unpacked alone it has a folder of its own there,
with an owner and a mode that nobody gave it, and a folder also where the image has a link to one. Here such folders
get what the layer below says of them, and what lies behind a link goes where the link leads, as when layers are
unpacked one over the other. A hard link to a file of a layer below becomes one: the file is copied to here with all of
its names. A folder with whiteouts in which no other layer has anything gets a second one: the kernel hides whiteouts
only where it merges.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .layer_archive import LayerRefused
from .unpack import LINKS_FOLLOWED

Parts = tuple[bytes, ...]


@dataclass(frozen=True)
class UnpackedLayer:
    """A layer in the store."""

    path: bytes
    implied: frozenset[bytes]
    """Folders that it puts something into without naming them."""
    links: Mapping[bytes, bytes]
    """Hard links to files of layers below."""
    whiteouts: frozenset[bytes]
    """Folders in which it hides something."""
    names_root: bool
    """Whether it says whose the root is."""


def write_joined(layers: Sequence[UnpackedLayer], target: str, overlay: str) -> None:
    """Make the layer for these, topmost first, in an empty folder."""
    _Joined(layers, os.fsencode(target), f"{overlay}.overlay.opaque").write()


def has_lone_whiteouts(layers: Sequence[UnpackedLayer], overlay: str) -> bool:
    """Whether these, topmost first, have folders with whiteouts and nothing below to hide."""
    return any(True for _ in _Joined(layers, b"", f"{overlay}.overlay.opaque").lone_whiteouts())


class _Joined:
    def __init__(self, layers: Sequence[UnpackedLayer], target: bytes, opaque: str) -> None:
        self._layers = layers
        self._target = target
        self._opaque = opaque
        self._moved: set[Parts] = set()
        self._copies: dict[tuple[int, int], bytes] = {}
        self._folder_times: dict[bytes, int] = {}

    def write(self) -> None:
        for number in reversed(range(len(self._layers))):
            for path in sorted(self._layers[number].implied):
                parts = tuple(path.split(b"/"))
                if not self._is_moved(parts):
                    self._move(number, parts)
        for path in sorted(set().union(*(layer.implied for layer in self._layers))):
            parts = tuple(path.split(b"/"))
            named = [self._is_named(number, parts) for number in self._folders(parts)]
            if any(named) and not named[0] and not self._is_moved(parts):
                self._make_folder(parts)
        for number, layer in enumerate(self._layers):
            for path, target in layer.links.items():
                self._link_across(number, tuple(path.split(b"/")), tuple(target.split(b"/")))
        for parts in self.lone_whiteouts():
            self._make_folder(parts)
        for layer in self._layers:
            if layer.names_root:
                _take_attributes(layer.path, self._target)
                break
        for path, mtime_ns in self._folder_times.items():
            os.utime(path, ns=(mtime_ns, mtime_ns))

    def lone_whiteouts(self) -> Iterator[Parts]:
        """Folders with whiteouts that are shown as they are in one layer."""
        for number, layer in enumerate(self._layers):
            for path in layer.whiteouts:
                parts = tuple(path.split(b"/"))
                if self._folders(parts) == [number]:
                    yield parts

    def _is_moved(self, parts: Parts) -> bool:
        return any(parts[:length] in self._moved for length in range(1, len(parts) + 1))

    def _is_named(self, number: int, parts: Parts) -> bool:
        return b"/".join(parts) not in self._layers[number].implied

    def _place(self, number: int, parts: Parts) -> bytes:
        return os.path.join(self._layers[number].path, *parts)

    def _folders(self, parts: Parts, first: int = 0) -> list[int]:
        """The layers whose folders of this name are seen as one, topmost first; empty when it is no folder."""
        seen = list(range(first, len(self._layers)))
        for length in range(1, len(parts) + 1):
            merged = []
            for number in seen:
                mode = _mode(self._place(number, parts[:length]))
                if mode and not stat.S_ISDIR(mode):
                    break
                if mode:
                    merged.append(number)
                    if self._is_opaque(self._place(number, parts[:length])):
                        break
            seen = merged
        return seen

    def _is_opaque(self, path: bytes) -> bool:
        with contextlib.suppress(OSError):
            return os.getxattr(path, self._opaque) == b"y"
        return False

    def _link(self, parts: Parts, first: int) -> bytes | None:
        """The layer's path of the link that is seen there, in the layers from `first` down."""
        for number in self._folders(parts[:-1], first) if parts[:-1] else range(first, len(self._layers)):
            mode = _mode(self._place(number, parts))
            if mode:
                return self._place(number, parts) if stat.S_ISLNK(mode) else None
        return None

    def _follow(self, parts: Parts, first: int) -> Parts | None:
        """The folder that a name means in the layers from `first` down."""
        left: list[bytes] = list(parts)
        reached: Parts = ()
        for _ in range(LINKS_FOLLOWED * 10):
            if not left:
                return reached if self._folders(reached, first) else None
            name = left.pop(0)
            if name in (b"", b"."):
                continue
            if name == b"..":
                reached = reached[:-1]
                continue
            link = self._link((*reached, name), first)
            if link is None:
                reached = (*reached, name)
                continue
            to = os.readlink(link)
            left = [*to.split(b"/"), *left]
            if to.startswith(b"/"):
                reached = ()
        return None

    def _move(self, number: int, parts: Parts) -> None:
        link = self._link(parts, number + 1)
        goal = self._follow(parts, number + 1) if link else None
        above = [upper for upper in range(number) if _mode(self._place(upper, parts))]
        if link is None or goal is None or any(self._is_named(upper, parts) for upper in above):
            return
        self._moved.add(parts)
        if not os.path.lexists(self._made(parts)):
            self._make_folder(parts[:-1])
            self._copy(link, self._made(parts))
        for each in [*above, number]:  # the topmost first: what is there already stays
            self._move_content(each, self._place(each, parts), goal)

    def _move_content(self, number: int, source: bytes, goal: Parts) -> None:
        self._make_folder(goal)
        with os.scandir(source) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            path, to = os.path.join(source, name), (*goal, name)
            if stat.S_ISDIR(os.lstat(path).st_mode):
                if not self._folders(to) and not os.path.isdir(self._made(to)):
                    self._copy(path, self._made(to))
                self._move_content(number, path, to)
            elif not os.path.lexists(self._made(to)) and not any(_mode(self._place(n, to)) for n in range(number)):
                self._copy(path, self._made(to))

    def _link_across(self, number: int, parts: Parts, target: Parts) -> None:
        """A name of layer `number` and the file below that it stands for become one file, with all names still seen."""
        if self._is_moved(parts[:-1]):
            parts = (*(self._follow(parts[:-1], number + 1) or parts[:-1]), parts[-1])
        if not self._is_seen(number, parts):
            return
        below, place = self._source(number, target)
        source = self._place(below, place)
        others = self._names_of(below, os.lstat(source))
        for name in [*sorted(other for other in others if self._is_seen(below, other)), parts]:
            if not os.path.lexists(self._made(name)):
                self._make_folder(name[:-1])
                self._copy(source, self._made(name))

    def _source(self, number: int, target: Parts) -> tuple[int, Parts]:
        """The layer below `number`, and the path in it, of the file that is seen as `target` there."""
        first = number + 1
        folder = self._follow(target[:-1], first) if target[:-1] else ()
        if folder is not None:
            place = (*folder, target[-1])
            for below in self._folders(folder, first) if folder else range(first, len(self._layers)):
                if (again := self._layers[below].links.get(b"/".join(place))) is not None:
                    return self._source(below, tuple(again.split(b"/")))
                mode = _mode(self._place(below, place))
                if mode and not stat.S_ISDIR(mode) and not stat.S_ISCHR(mode):
                    return below, place
                if mode:
                    break
        shown = os.fsdecode(b"/".join(target))[:200]
        raise LayerRefused(f"a hard link to {shown!r}, which neither its layer nor one below has")

    def _names_of(self, number: int, info: os.stat_result) -> Iterator[Parts]:
        """Every name that a file has in its layer."""
        top = self._layers[number].path
        left = info.st_nlink
        for path, _, names in os.walk(top):
            for name in names:
                found = os.lstat(os.path.join(path, name))
                if found.st_ino == info.st_ino:
                    yield tuple(os.path.relpath(os.path.join(path, name), top).split(b"/"))
                    left -= 1
            if not left:
                return

    def _is_seen(self, number: int, parts: Parts) -> bool:
        """Whether what a layer has at this name is what the image shows there."""
        above = self._folders(parts[:-1]) if parts[:-1] else list(range(len(self._layers)))
        if number not in above:
            return False
        path = b"/".join(parts)
        return not any(
            upper < number and (_mode(self._place(upper, parts)) or path in self._layers[upper].links)
            for upper in above
        )

    def _made(self, parts: Parts) -> bytes:
        return os.path.join(self._target, *parts)

    def _make_folder(self, parts: Parts) -> None:
        """With what the topmost layer that names it says of it."""
        if not parts or os.path.lexists(self._made(parts)):
            return
        self._make_folder(parts[:-1])
        folders = self._folders(parts)
        named = [number for number in folders if self._is_named(number, parts)]
        os.mkdir(self._made(parts))
        if folders:
            self._dress_folder(self._place((named or folders)[0], parts), self._made(parts))

    def _dress_folder(self, source: bytes, target: bytes) -> None:
        _take_attributes(source, target)
        self._folder_times[target] = os.lstat(source).st_mtime_ns

    def _copy(self, source: bytes, target: bytes) -> None:
        info = os.lstat(source)
        kind = stat.S_IFMT(info.st_mode)
        first = self._copies.setdefault((info.st_dev, info.st_ino), target)
        if first != target and kind != stat.S_IFDIR:
            os.link(first, target, follow_symlinks=False)
            return
        if kind == stat.S_IFLNK:
            os.symlink(os.readlink(source), target)
        elif kind == stat.S_IFDIR:
            os.mkdir(target)
            self._dress_folder(source, target)
            return
        elif kind == stat.S_IFREG:
            shutil.copyfile(source, target)
        else:
            os.mknod(target, info.st_mode, info.st_rdev)
        _take_attributes(source, target)


def _mode(path: bytes) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _take_attributes(source: bytes, target: bytes) -> None:
    info = os.lstat(source)
    os.chown(target, info.st_uid, info.st_gid, follow_symlinks=False)
    if not stat.S_ISLNK(info.st_mode):
        os.chmod(target, stat.S_IMODE(info.st_mode))
    with contextlib.suppress(OSError):
        for name in os.listxattr(source, follow_symlinks=False):
            if ".overlay." not in name or stat.S_ISREG(info.st_mode):
                os.setxattr(target, name, os.getxattr(source, name, follow_symlinks=False), follow_symlinks=False)
    os.utime(target, ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
