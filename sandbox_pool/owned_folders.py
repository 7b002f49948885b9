"""Temporary folders that say which process they belong to, so that the next start removes those of killed ones.

They stand in `<temporary directory>/hermes-rl-folders-<uid>/<owner's tag>/`, where no other user can put or change
anything.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from sandbox_pool.errors import StateError
from sandbox_pool.journal.owner import Owner, is_alive, this_process
from sandbox_pool.server.host_files import NotPrivate, open_private, remove_tree

log = logging.getLogger(__name__)
PLACES = ("/var/tmp", "/dev/shm")
"""Tried when the temporary directory cannot be used, because another user made our folder there for example."""

_swept: set[tuple[int, Path]] = set()
_lock = threading.Lock()


def make_owned_folder(prefix: str, root: Path | None = None) -> Path:
    """A new empty folder of this process; the first call also removes what killed processes left."""
    root = _root() if root is None else _private(root)
    own = root / this_process().tag()
    with _lock:
        if (os.getpid(), root) not in _swept:
            sweep(root)
            atexit.register(_remove_own, os.getpid(), own)
            _swept.add((os.getpid(), root))
        own.mkdir(mode=0o700, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=own))


@contextlib.contextmanager
def temporary_files_in(folder: Path) -> Iterator[None]:
    """Have `tempfile` make everything below the folder: for libraries that leave files when they are killed."""
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    try:
        yield
    finally:
        tempfile.tempdir = before


def sweep(root: Path) -> list[Path]:
    """Remove the folders of processes that are gone; which ones."""
    removed = []
    for folder in root.iterdir():
        try:
            owner = Owner.parse(folder.name)
        except ValueError:
            continue  # not one of ours
        if is_alive(owner, heartbeat_age_s=None):
            continue
        if problems := remove_tree(folder):
            log.warning("a folder of a killed process stays: %s", "; ".join(problems))
        else:
            removed.append(folder)
    return removed


def _root() -> Path:
    name = f"hermes-rl-folders-{os.getuid()}"
    refusals = []
    for place in dict.fromkeys((tempfile.gettempdir(), *PLACES)):
        try:
            return _private(Path(place) / name)
        except StateError as error:
            refusals.append(str(error))
    raise StateError(f"no temporary folder is safe from other users: {'; '.join(refusals)}; set TMPDIR")


def _private(root: Path) -> Path:
    try:
        os.close(open_private(root))
    except NotPrivate as error:
        raise StateError(str(error)) from error
    except OSError as error:
        raise StateError(f"{root} cannot be used: {error.strerror or error}") from error
    return root


def _remove_own(pid: int, own: Path) -> None:
    if pid == os.getpid():  # a fork has a folder of its own
        remove_tree(own)
