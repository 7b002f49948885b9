"""A host in an Apptainer (or Singularity) image: one instance per host, which holds its server and all its slots.

An instance needs no root and no daemon. The host's folder is bound into it at its own path, so whoever looks from
outside finds the same socket, record and log. Part of the packed server: standard library, Python 3.9.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

STARTER = "#!/bin/sh\nexit 0\n"
"""Run instead of the image's own start script, which a plain folder lacks and which could start anything."""
START_SCRIPT = "/.singularity.d/actions/start"
OF_CONTAINERS = ("APPTAINERENV_", "SINGULARITYENV_")
"""What sets variables inside: the server gets none of the user's."""
COMMAND_S = 300.0
Container = dict[str, Any]


class ContainerFault(Exception):
    """Apptainer could not do it, in its own words."""


def enter(container: Container, name: str, directory: Path, server: str, layers: str) -> list[str]:
    """Start the host's instance, with the folder of layers in it; the command that runs the server there and ends the
    instance after it."""
    starter = directory / "start"
    starter.write_text(STARTER)
    starter.chmod(0o755)
    binds = [str(directory), server, layers, f"{starter}:{START_SCRIPT}", *container["binds"]]
    flags = [word for bind in binds for word in ("--bind", bind)]
    program = container["program"]
    _run(program, "instance", "start", "--containall", *flags, *container["flags"], container["image"], name)
    inside = [program, "exec", "--cleanenv", "--pwd", "/", f"instance://{name}", container["python"], server]
    stop = shlex.join([program, "instance", "stop", "--force", name])
    return ["/bin/sh", "-c", f'"$@"; {stop} >/dev/null 2>&1', "sh", *inside]


def leave(program: str, name: str) -> None:
    """Make sure that there is no such instance, and nothing in the user's folder about it."""
    if name in _instances(program):
        with contextlib.suppress(ContainerFault):  # it ended meanwhile; looked at again below
            _run(program, "instance", "stop", "--force", name)
        if name in _instances(program):
            raise ContainerFault(f"the instance {name} does not end")
    # Apptainer keeps the logs of an instance that has ended, and of one that could not start.
    for log in _own().glob(f"instances/logs/*/*/{name}.*"):
        with contextlib.suppress(FileNotFoundError):
            log.unlink()


def image_file(container: Container) -> str:
    """The image as something that instances can be started from: a SIF file or a folder as it is, else built once.

    What is built is kept below APPTAINER_CACHEDIR, by the image's name and, for an archive, its size and age.
    """
    image = str(container["image"])
    if os.path.exists(image):
        return os.path.realpath(image)
    kind, colon, rest = image.partition(":")
    if not colon or (kind.endswith("archive") and not os.path.exists(rest)):
        raise ContainerFault(f"there is no image {image!r} on this machine")
    facts = os.stat(rest) if os.path.exists(rest) else None
    key = hashlib.sha256(f"{image} {facts and (facts.st_size, facts.st_mtime_ns)}".encode()).hexdigest()[:32]
    folder = _cache() / "hermes-rl"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / f"{key}.sif"
    with (folder / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            draft = folder / f"{key}.{os.getpid()}.sif"
            try:
                _run(container["program"], "build", "--force", str(draft), image, within_s=None)
                draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)
    return str(path)


def environment() -> dict[str, str]:
    """What the apptainer command is run with: all but what it would hand to the container."""
    return {name: text for name, text in os.environ.items() if not name.startswith(OF_CONTAINERS)}


def _cache() -> Path:
    return Path(os.environ.get("APPTAINER_CACHEDIR") or os.environ.get("SINGULARITY_CACHEDIR") or _own() / "cache")


def _own() -> Path:
    """Where Apptainer keeps what it knows about a user's instances."""
    return Path(os.environ.get("APPTAINER_CONFIGDIR") or os.path.expanduser("~/.apptainer"))


def _instances(program: str) -> list[str]:
    answer = json.loads(_run(program, "instance", "list", "--json"))
    return [each["instance"] for each in answer["instances"] or []]


def _run(program: str, *words: str, within_s: float | None = COMMAND_S) -> str:
    try:
        done = subprocess.run(
            [program, *words],
            env=environment(),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            check=False,
        )
    except OSError as error:
        raise ContainerFault(f"{program} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise ContainerFault(f"{program} {words[0]} {words[1]} has not ended in {within_s:g} s") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("FATAL", "ERROR"))]
        said = "; ".join(line.partition(":")[2].strip() for line in lines) or done.stderr.strip()[-500:]
        raise ContainerFault(f"{program} {words[0]}: {said}")
    return done.stdout
