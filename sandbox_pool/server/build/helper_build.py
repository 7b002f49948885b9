"""The slot helper: one static program per kind of machine, carried by the wheel or built here from the C sources.

The C compiler that is there builds for this machine. The `ziglang` package does too, and for the other machines.
What was built is kept in the cache directory under the hash of its sources. `python -m` this module builds all.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "helper"
MACHINES = ("x86_64", "aarch64")
"""As `uname -m` names them; those that helper/seccomp.c has a filter for."""
FLAGS = ("-O2", "-static", "-std=gnu11", "-Wall", "-Wextra")
WHAT_TO_INSTALL = "apt-get install gcc libc6-dev, or pip install ziglang"


class HelperMissing(Exception):
    """The helper is not there and cannot be built; the message says what to install."""


def cache_dir() -> Path:
    """Where built things are kept between runs; where others could change them, a folder that ends with this process.

    What lies there is run with the rights of this user.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    path = Path(base) / "hermes-rl"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        private = _others_cannot_write(path) and path.parent.stat().st_uid in (0, os.geteuid())
    except OSError:
        private = False
    return path if private else _passing_cache()


def _others_cannot_write(path: Path) -> bool:
    info = path.stat()
    by_others = info.st_mode & 0o002 or (info.st_mode & 0o020 and info.st_gid not in (0, os.getegid()))
    return info.st_uid == os.geteuid() and not by_others and os.access(path, os.W_OK)


@functools.cache
def _passing_cache() -> Path:
    path = tempfile.mkdtemp(prefix="hermes-rl-cache-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


def helper_name(machine: str) -> str:
    """Its file name. The hash keeps a helper built from other sources from being used."""
    digest = hashlib.sha256(repr(FLAGS).encode())
    for path in sorted(SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + path.read_bytes())
    return f"slot-helper-{machine}-{digest.hexdigest()[:16]}"


def find_helper(machine: str) -> Path | None:
    """The helper for this kind of machine, if the wheel carried it or it was built before."""
    name = helper_name(machine)
    return next((path for path in (SOURCES / name, cache_dir() / name) if path.exists()), None)


def compilers(machine: str) -> list[list[str]]:
    """Commands that may compile for this kind of machine, the quickest first."""
    found = []
    if machine == platform.machine() and sys.platform == "linux":
        native = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
        found += [shlex.split(native)] if native else []
    if importlib.util.find_spec("ziglang") is not None:
        found.append([sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-musl"])
    return found


def get_helper(machine: str) -> Path:
    """The helper for this kind of machine, built now if need be. Raises HelperMissing."""
    found = find_helper(machine)
    if found is not None:
        return found
    if machine not in MACHINES:
        raise HelperMissing(f"slots run on {' and '.join(MACHINES)} machines, not on {machine}")
    target = cache_dir() / helper_name(machine)
    problem = "there is no C compiler for it"
    for command in compilers(machine):
        try:
            _compile(command, target)
        except OSError as error:
            problem = str(error)
        except subprocess.CalledProcessError as error:
            problem = f"{shlex.join(command)}: {error.stderr.strip()[-500:]}"
        else:
            return target
    raise HelperMissing(f"the slot helper for {machine} cannot be built ({problem}): {WHAT_TO_INSTALL}")


def _compile(command: list[str], target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        draft = Path(work) / "slot-helper"
        sources = [str(path) for path in sorted(SOURCES.glob("*.c"))]
        subprocess.run([*command, *FLAGS, "-o", str(draft), *sources, "-s"], capture_output=True, text=True, check=True)
        draft.replace(target)


if __name__ == "__main__":
    try:
        sys.stdout.write("".join(f"{get_helper(machine)}\n" for machine in MACHINES))
    except HelperMissing as missing:
        sys.exit(str(missing))
