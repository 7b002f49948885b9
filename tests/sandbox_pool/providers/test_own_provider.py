"""The provider in examples/, from which "Add a provider" in CONTRIBUTING starts, keeps the promises in few lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("only", [["--only", "lease"], pytest.param([], marks=pytest.mark.slow)])
def test_it_passes_the_conformance_suite_and_leaves_nothing(tmp_path, only):
    command = ["-m", "environments.apps.cli.main", "pool", "check", "--provider", "examples.own_provider:OwnProvider"]
    ended = subprocess.run(
        [sys.executable, *command, *only, "--state-dir", str(tmp_path / "state"), "--json"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout)["counts"]["passed"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    assert list((tmp_path / "state" / "own_provider").iterdir()) == []


def test_it_is_a_page_of_code():
    body = (ROOT / "examples" / "own_provider.py").read_text().split('"""', 2)[2].splitlines()
    assert sum(bool(line.strip()) and not line.startswith(("import ", "from ")) for line in body) <= 60
