"""Temporary folders that cannot outlive their process for good: a killed one's are removed by the next that asks.

Each process keeps its folders below one that is named after it (`sandbox_pool.owner`), so whether they are still needed
can be told exactly.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
from pathlib import Path

from sandbox_pool.owner import Owner, is_alive, this_process

_swept: set[tuple[int, Path]] = set()
_lock = threading.Lock()


def make_owned_folder(prefix: str, root: Path | None = None) -> Path:
    """A new empty folder of this process; the first call also removes what killed processes left."""
    root = root or Path(tempfile.gettempdir()) / f"hermes-rl-folders-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = root / this_process().tag()
    with _lock:
        if (os.getpid(), root) not in _swept:
            sweep(root)
            atexit.register(shutil.rmtree, own, ignore_errors=True)
            _swept.add((os.getpid(), root))
        own.mkdir(mode=0o700, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=own))


def sweep(root: Path) -> list[Path]:
    """Remove the folders of processes that are gone; which ones."""
    removed = []
    for folder in root.iterdir():
        try:
            owner = Owner.parse(folder.name)
        except ValueError:
            continue  # not one of ours
        if not is_alive(owner, heartbeat_age_s=None):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed
