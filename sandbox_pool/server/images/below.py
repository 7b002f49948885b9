"""The lowest layer of every slot with an image: what an image may lack and a slot needs.

Folders to mount on, files of /etc to show ours at, and a shell. An image without bash gets the host's, which runs by
its own loader with its own libraries, so that it needs nothing of the image.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

FOLDERS = {"dev": 0o755, "proc": 0o555, "sys": 0o555, "etc": 0o755, "tmp": 0o1777}
FILES = ("etc/hosts", "etc/resolv.conf")
BROUGHT = ".hermes-rl"
OWN_SHELLS = ("/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash")


def make_below(target: str) -> None:
    """Make the layer; without a bash of the host that can be brought it has none."""
    for path in (target, shell_layer(target)):
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(path, 0o755)
        os.chmod(path, 0o755)
    for name, mode in FOLDERS.items():
        os.mkdir(os.path.join(target, name))
        os.chmod(os.path.join(target, name), mode)
    for name in FILES:
        with open(os.path.join(target, name), "w"):
            pass
        os.chmod(os.path.join(target, name), 0o644)
    bash = shutil.which("bash-static") or shutil.which("bash")
    if bash is not None:
        _bring(os.path.realpath(bash), os.path.join(shell_layer(target), BROUGHT))


def shell_layer(below: str) -> str:
    """The layer that brings the shell, for images that need it."""
    return f"{below}-shell"


def _bring(bash: str, folder: str) -> None:
    os.mkdir(folder, 0o755)
    os.chmod(folder, 0o755)
    for source, name in ((bash, "bash"), *((path, os.path.basename(path)) for path in _libraries(bash))):
        shutil.copyfile(source, os.path.join(folder, name))
        os.chmod(os.path.join(folder, name), 0o755)


def _libraries(program: str) -> list[str]:
    """What the loader would load for it, the loader itself last; nothing for a static program."""
    listed = subprocess.run(
        [program], env={"LD_TRACE_LOADED_OBJECTS": "1"}, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    found = []
    for line in listed.stdout.decode("utf-8", "replace").splitlines():
        paths = [word for word in line.split() if word.startswith("/")]
        if paths:
            found.append(paths[-1])
    return sorted(found, key=lambda path: os.path.basename(path).startswith("ld"))


def shells(below: str) -> list[tuple[str, ...]]:
    """Commands that may start a shell in an image, in the order in which they are tried."""
    tried: list[tuple[str, ...]] = [(path,) for path in OWN_SHELLS]
    brought = os.path.join(shell_layer(below), BROUGHT)
    names = os.listdir(brought) if os.path.isdir(brought) else []
    loaders = [name for name in names if name.startswith("ld")]
    if loaders:
        place = f"/{BROUGHT}"
        tried.append((f"{place}/{loaders[0]}", "--library-path", place, f"{place}/bash"))
    elif names:
        tried.append((f"/{BROUGHT}/bash",))
    return tried


def is_brought(program: Sequence[str]) -> bool:
    """Whether this shell is ours and not the image's."""
    return program[-1].startswith(f"/{BROUGHT}/")
