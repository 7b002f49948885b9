"""The real benchmarks, whole: their own right answers score 1 apart from the items that docs name. See prepare.sh."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / ".tools" / "benchmarks"
DEBIAN = HOME / "debian"
SWE_IMAGES = HOME / "swe_bench"
PAGE = ROOT / "docs" / "how-to" / "benchmarks.md"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="run tests/live/benchmarks/prepare.sh first"),
]


def rows_of(text: str) -> dict[str, list[str]]:
    """Rows of the table by benchmark: items, oracle, no-op, and the items named. Seconds differ by machine."""
    lines = (re.split(r"\s*\|\s*", line.strip("| \n")) for line in text.splitlines() if line.startswith("| "))
    return {cells[0]: [*cells[1:4], *cells[5:7]] for cells in lines if len(cells) == 7 and cells[0] != "benchmark"}


DOCUMENTED = rows_of(PAGE.read_text("utf-8"))


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_the_oracle_and_the_no_op_score_as_documented(name: str, tmp_path: Path) -> None:
    words = [str(HOME / "venv/bin/hermes-rl"), "oracle", name, "--out", str(tmp_path / "runs")]
    if name == "agentbench_os":
        if not DEBIAN.is_dir():
            pytest.skip("prepare.sh made no Debian: mmdebstrap is missing")
        words += ["--env.image", str(DEBIAN)]
    if name == "swe_bench":
        if not (SWE_IMAGES / "ready").is_file():
            pytest.skip("prepare.sh made no images: mmdebstrap or buildah is missing")
        words += ["--env.dataset", str(ROOT / "examples/swe_bench/rows.jsonl")]
        words += ["--env.image", f"oci:{SWE_IMAGES}/{{instance_id}}:1"]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert rows_of(done.stdout) == {name: DOCUMENTED[name]}, done.stderr[-3000:]
    assert done.returncode == int(DOCUMENTED[name][3] != "none")  # 1 when the oracle fails an item
