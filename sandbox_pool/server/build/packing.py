"""Packs the server with its compiled helper into one file: a zip application that Python 3.9 and later can run."""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
import zipfile
from pathlib import Path

from .helper_build import SOURCES, cache_dir, helper_binary

PACKAGE = "hermes_slot_server"
HELPER_NAME = "slot-helper"
_EPOCH = (1980, 1, 1, 0, 0, 0)
_MAIN = f"from {PACKAGE}.main import main\n\nmain()\n"


def build(compiled: bool) -> bytes:
    """The packed server; the same sources give the same bytes."""
    helper = helper_binary() if compiled else None
    package = SOURCES.parent
    paths = [path for path in sorted(package.rglob("*.py")) if path.parent.name != "build"]
    modules = {str(path.relative_to(package)): path.read_bytes() for path in paths}
    binary = helper.read_bytes() if helper else b""
    digest = hashlib.sha256(repr(sorted(modules.items())).encode() + binary).hexdigest()[:16]
    cached = cache_dir() / f"slot-server-{digest}.pyz"
    if cached.exists():
        return cached.read_bytes()
    data = _pack(modules, binary)
    _store(cached, data)
    return data


def _pack(modules: dict[str, bytes], binary: bytes) -> bytes:
    buffer = io.BytesIO()
    buffer.write(b"#!/usr/bin/env python3\n")
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "__main__.py", _MAIN.encode())
        for name, source in modules.items():
            _add(archive, f"{PACKAGE}/{name}", source)
        if binary:
            _add(archive, f"{PACKAGE}/{HELPER_NAME}", binary)
    return buffer.getvalue()


def _add(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    archive.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)


def _store(path: Path, data: bytes) -> None:
    """Best effort: a cache that can not be written only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as draft:
            draft.write(data)
        os.replace(draft.name, path)
    except OSError:
        return
