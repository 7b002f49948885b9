"""The readers of the C helper on hostile bytes, with ASan and UBSan: the corpus each time, new inputs when slow."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "fuzz.sh"
NOTHING_TO_BUILD_WITH = 77


def fuzz(seconds: int, folder: Path) -> None:
    done = subprocess.run(["bash", SCRIPT, str(seconds)], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == NOTHING_TO_BUILD_WITH:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert list(folder.iterdir()) == []


def test_the_corpus_finds_nothing(tmp_path: Path) -> None:
    fuzz(0, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_new_inputs_find_nothing(tmp_path: Path) -> None:
    fuzz(int(os.environ.get("FUZZ_SECONDS", "600")), tmp_path)
