"""Removing what agents made: by descriptor, never through a link, and however deep it is."""

from __future__ import annotations

import contextlib
import itertools
import os

_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: str) -> list[str]:
    """Remove a file or tree; returns what is still there, at most a few of it. Blocks: not for the event loop."""
    try:
        top = os.open(path, _FLAGS)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return [path] if os.path.lexists(path) else []
    try:
        left = _empty(top)
    finally:
        os.close(top)
    with contextlib.suppress(OSError):
        os.rmdir(path)
    return [os.path.join(path, name) for name in left[:5]] or ([path] if os.path.lexists(path) else [])


def _empty(top: int) -> list[str]:
    """Folders inside folders are moved up to `top`: the depth of a tree costs neither stack nor descriptors."""
    numbers = itertools.count()
    failed: set[str] = set()
    while names := set(os.listdir(top)) - failed:
        for name in names:
            if not _remove_child(top, name, numbers):
                failed.add(name)
    return sorted(failed)


def _remove_child(top: int, name: str, numbers: itertools.count[int]) -> bool:
    try:
        child = os.open(name, _FLAGS, dir_fd=top)
    except OSError:
        return _unlink(top, name)
    try:
        with contextlib.suppress(OSError):
            os.fchmod(child, 0o700)
        for entry in os.listdir(child):
            if not _unlink(child, entry):
                with contextlib.suppress(OSError):
                    os.rename(entry, f".removed-{os.getpid()}-{next(numbers)}", src_dir_fd=child, dst_dir_fd=top)
    except OSError:
        return False
    finally:
        os.close(child)
    return _unlink(top, name)


def _unlink(directory: int, name: str) -> bool:
    for remove in (os.unlink, os.rmdir):
        with contextlib.suppress(OSError):
            remove(name, dir_fd=directory)
            return True
    return False
