"""Finds the strongest isolation this place allows, by building a slot at each level and running a command in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import select
import sys
import termios
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

from ..faults import SlotError, TimedOut
from ..images.below import make_below
from ..images.user_ids import run_module, subordinate_ids
from ..isolation.cgroups import Cgroups
from ..isolation.host_view import build_view
from ..isolation.layers import make_layers_dir
from ..isolation.levels import RANK, Level, Place, candidates, choose_uids
from ..isolation.private_files import PrivateFiles
from .slots import Builder, prove_shell
from .zygote import BuildError, Zygote

TERMINAL_WAIT_S = 2.0
PROBE_SPEC = {"network": "none", "memory_mb": 256, "disk_mb": 64, "pids": 64}


class Host:
    """The chosen level with what is needed to build slots at it."""

    def __init__(self, zygote: Zygote, level: Level, builder: Builder, rejected: list[tuple[str, str]]) -> None:
        self.zygote = zygote
        self.level = level
        self.builder = builder
        self.rejected = rejected
        self.on_lost: Callable[[], None] = lambda: None

    def facts(self) -> dict[str, Any]:
        """How slots are isolated here, for every client to see."""
        return {
            "isolation": self.level.name,
            "variant": self.level.variant,
            "isolation_reason": _reason(self.level, self.rejected),
            "rejected": self.rejected,
            "missing": [
                *missing_limits(self.level, self.builder.cgroups),
                *(() if controlling_terminal_works() else ("tty",)),
            ],
        }


def _reason(level: Level, rejected: Sequence[tuple[str, str]]) -> str:
    text = f"a slot was built and probed at level {level.label}"
    if rejected:
        text += "; stronger levels refused: " + ", ".join(f"{name} ({why})" for name, why in rejected)
    return text


def missing_limits(level: Level, cgroups: Cgroups) -> list[str]:
    """Promises of a spec that cannot be kept here."""
    missing = list(cgroups.missing)
    if "pids" in missing and (level.user_ns or (level.own_uid and os.geteuid() == 0)):
        missing.remove("pids")  # RLIMIT_NPROC counts per user, and the slot has one of its own
    if not level.namespaces:
        missing += ["disk"]
        missing.append("loopback" if level.landlock else "network")
    if level.landlock and os.geteuid() != 0:
        missing.append("signals")  # a domain per command is all that keeps commands from signalling the server
    return missing


def controlling_terminal_works() -> bool:
    """Found by writing to it from a process that has a new terminal."""
    try:
        ours, theirs = os.openpty()
    except OSError:
        return False
    pid = os.fork()
    if pid == 0:
        _write_and_exit(theirs)
    os.close(theirs)
    try:
        arrived, _, _ = select.select([ours], [], [], TERMINAL_WAIT_S)
        return bool(arrived) and os.read(ours, 1) == b"!"
    except OSError:  # the other side was closed, and nothing had been written
        return False
    finally:
        os.close(ours)
        os.waitpid(pid, 0)


def _write_and_exit(terminal: int) -> None:
    with contextlib.suppress(OSError):
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        os.write(os.open("/dev/tty", os.O_RDWR), b"!")
    os._exit(0)


def unpack_helper(scratch: str) -> str:
    """Put the helper that the packed server carries for this machine into the scratch directory; returns its path."""
    machine, path = platform.machine(), os.path.join(scratch, "helper")
    with zipfile.ZipFile(sys.argv[0]) as packed:
        carried = [packed.read(name) for name in packed.namelist() if name.endswith(f"/slot-helper-{machine}")]
    if not carried:
        fix = "install hermes-rl from its wheel, or run `make helpers` in its checkout"
        raise SlotError("refused", f"this slot server carries no helper for {machine}: {fix}")
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o700), "wb") as file:
        file.write(carried[0])
    return path


def _prepare(scratch: str, slots: int) -> Place:
    run_dir, layers = os.path.join(scratch, "run"), make_layers_dir(scratch)
    os.makedirs(os.path.join(run_dir, "m"), exist_ok=True)
    os.chmod(run_dir, 0o755)
    parts = build_view(os.path.join(layers, "views", "view"))
    os.chmod(os.path.join(layers, "views"), 0o755)
    place = Place(scratch, layers, tuple(parts), *choose_uids(scratch, slots), subordinate_ids() is not None)
    make_below(place.below_images)
    return place


async def find_host(scratch: str, slots: int, minimum: str, forced: str | None) -> Host:
    """The strongest level that works. Refuses when it is weaker than `minimum`."""
    place = _prepare(scratch, slots)
    cgroups = Cgroups(scratch)
    cgroups.setup()
    found: list[Host] = []
    helper = unpack_helper(scratch)
    rejected: list[tuple[str, str]] = []
    for level in candidates(forced):
        if RANK[level.name] < RANK[minimum]:
            break
        zygote = Zygote(_start_of(helper, level, place), os.path.join(scratch, "run"), lambda: _tell_lost(found))
        builder = Builder(zygote, level, place, cgroups)
        problem = await _probe(builder)
        if problem is None:
            host = Host(zygote, level, builder, rejected)
            found.append(host)
            return host
        zygote.close()
        rejected.append((level.label, problem))
    tried = "; ".join(f"{name}: {why}" for name, why in rejected)
    raise SlotError("isolation", f"IsolationUnavailable: no level of at least {minimum!r} works here ({tried})")


def _start_of(helper: str, level: Level, place: Place) -> list[str]:
    """Ranges of ids come with a user namespace around the zygote. Its root has every right over this user's processes
    and files of those ids, so no command may run in it: only slots with a user namespace of their own are made there.
    """
    return [*run_module("user_ids"), helper] if place.id_ranges and level.user_ns else [helper]


def _tell_lost(found: list[Host]) -> None:
    for host in found:
        host.on_lost()


async def _probe(builder: Builder) -> str | None:
    """None when a slot at this level can be built, run a command and be destroyed; else what went wrong."""
    try:
        if builder.level.namespaces and not builder.level.stranger:
            builder.private = PrivateFiles(os.path.join(builder.place.views, "view"), builder.place.parts)
        instance = await builder.build(0, PROBE_SPEC, ())
    except (TimedOut, BuildError, OSError) as error:
        return str(error) or type(error).__name__
    try:
        problem = await prove_shell(instance)
    finally:
        problems = await builder.destroy(instance, 0)
    return problem or "; ".join(problems) or None
