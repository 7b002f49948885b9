"""Packs the server with its compiled helpers into one file: a zip application that Python 3.9 and later can run."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import marshal
import os
import platform
import sys
import tempfile
import zipfile
from pathlib import Path

from sandbox_pool.errors import HostStartFailed

from .helper_build import MACHINES, SOURCES, HelperMissing, cache_dir, find_helper, get_helper

PACKAGE = "hermes_slot_server"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_MAIN = f"from {PACKAGE}.main import main\n\nmain()\n"


def pack(*, any_machine: bool = False) -> bytes:
    """The whole server as one file that a provider copies somewhere and starts. The same sources and the same Python
    give the same bytes.

    It carries the helper for this kind of machine, and this Python's bytecode. For hosts that may be another kind,
    `any_machine` adds the helpers that are there already (building one takes most of a minute, too long for the start
    of a host) and leaves out the bytecode.
    """
    helpers = _helpers(any_machine)
    package = SOURCES.parent
    paths = [path for path in sorted(package.rglob("*.py")) if path.parent.name != "build"]
    modules = {str(path.relative_to(package)): path.read_bytes() for path in paths}
    content = {**modules, **{f"slot-helper-{machine}": path.read_bytes() for machine, path in helpers.items()}}
    parts = (any_machine or sys.implementation.cache_tag, Path(__file__).read_bytes(), sorted(content.items()))
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
    cached = cache_dir() / f"slot-server-{digest}.pyz"
    if cached.exists():
        return cached.read_bytes()
    compiled = {} if any_machine else {f"{name}c": _compiled(name, source) for name, source in modules.items()}
    data = _zip({**content, **compiled})
    _store(cached, data)
    return data


def _compiled(name: str, source: bytes) -> bytes:
    """A module as this Python's bytecode: a zip keeps none, so every start would compile the whole server (0.3 s).

    Another version of Python does not know it and takes the source beside it.
    """
    unchecked = 0b01  # based on a hash, and the source is not asked
    # Version 2: later ones write objects differently by how often this very process refers to them.
    code = marshal.dumps(compile(source, f"{PACKAGE}/{name}", "exec", dont_inherit=True), 2)
    return importlib.util.MAGIC_NUMBER + unchecked.to_bytes(4, "little") + importlib.util.source_hash(source) + code


def _helpers(any_machine: bool) -> dict[str, Path]:
    there = {machine: find_helper(machine) for machine in MACHINES} if any_machine else {}
    helpers = {machine: path for machine, path in there.items() if path is not None}
    problem = ""
    for machine in _to_build(bool(helpers)):
        try:
            helpers[machine] = get_helper(machine)
        except HelperMissing as error:
            problem = str(error)
    if not helpers:
        raise HostStartFailed(problem)
    return helpers


def _to_build(some: bool) -> tuple[str, ...]:
    """A client that is not Linux needs no helper itself, but its hosts need one."""
    if platform.system() == "Linux":
        return (platform.machine(),)
    return () if some else MACHINES


def _zip(content: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    buffer.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "__main__.py", _MAIN.encode())
        for name, data in sorted(content.items()):
            _add(archive, f"{PACKAGE}/{name}", data)
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)


def _store(path: Path, data: bytes) -> None:
    """Best effort: a cache that cannot be written only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
            draft.write(data)
        os.replace(draft.name, path)
    except OSError:
        return
