"""The compiled helper: built from the C sources where there is a compiler, cached by the hash of the sources."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "helper"
FLAGS = ("-O2", "-static", "-std=gnu11", "-Wall", "-Wextra")


def cache_dir() -> Path:
    """Where built things are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "hermes-rl"


def source_hash() -> str:
    """Identifies the helper's sources and this architecture."""
    digest = hashlib.sha256(platform.machine().encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def prebuilt() -> Path:
    """Where a wheel carries its compiled helper; the hash in the name keeps one of other sources from being used."""
    return SOURCES / f"slot-helper-{source_hash()}"


def compile_helper(target: Path) -> str | None:
    """Compile to `target`; returns what went wrong, or None."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
    if compiler is None:
        return "no C compiler found"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        draft = Path(work) / "slot-helper"
        sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
        done = subprocess.run(
            [compiler, *FLAGS, "-o", str(draft), *sources, "-s"], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            return done.stderr[-2000:] or f"{compiler} failed"
        draft.replace(target)
    return None


def helper_binary() -> Path | None:
    """The helper, built now if need be; None where it can not be built."""
    if prebuilt().exists():
        return prebuilt()
    target = cache_dir() / f"slot-helper-{source_hash()}"
    if not target.exists() and compile_helper(target) is not None:
        return None
    return target
