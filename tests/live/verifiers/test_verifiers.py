"""The real verifiers 0.4 with our taskset and harness. Prepared by tests/live/verifiers/prepare.sh."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
HOME = HERE.parents[2] / ".tools" / "verifiers"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="run tests/live/verifiers/prepare.sh first"),
]


def run(program: str, folder: Path) -> dict[str, Any]:
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "HF_HUB_OFFLINE": "1"}
    command = [str(HOME / "venv/bin/python"), str(HERE / program)]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_over_zmq_every_branch_holds_the_ids_masks_and_logprobs_that_the_server_sampled(tmp_path: Path) -> None:
    found = run("env_server.py", tmp_path)
    assert found["errors"] == []
    assert found["ok"] == found["episodes"] == found["branches"] == found["equal"] == 8
    assert found["sampled_tokens"] > 0
    assert max(found["rewards"]) == 1.0
