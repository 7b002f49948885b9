"""Opens a page in headless Chromium: the DOM after its scripts ran, or a screenshot."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

BINARY = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_chromium = pytest.mark.skipif(BINARY is None, reason="Chromium is not installed")

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--virtual-time-budget=5000",
)


def _run(page: Path, state: str, width: int, *more: str) -> bytes:
    assert BINARY is not None
    with tempfile.TemporaryDirectory() as profile:
        size = f"--window-size={width},1400"
        words = [BINARY, *FLAGS, size, f"--user-data-dir={profile}", *more, f"{page.resolve().as_uri()}#{state}"]
        return subprocess.run(words, capture_output=True, check=True, timeout=90).stdout


def dom(page: Path, state: str = "", width: int = 1600, *flags: str) -> str:
    """The document after its scripts ran, as markup."""
    return _run(page, state, width, "--dump-dom", *flags).decode()


def screenshot(page: Path, target: Path, state: str = "", width: int = 1600) -> bytes:
    """A PNG of the page."""
    _run(page, state, width, f"--screenshot={target}")
    return target.read_bytes()
