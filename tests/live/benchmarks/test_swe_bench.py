"""`swe_bench` on the two repositories of examples/swe_bench, in images made here, judged by the real package."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
HOME = ROOT / ".tools" / "benchmarks"
IMAGES = HOME / "swe_bench"
ROWS = ROOT / "examples" / "swe_bench" / "rows.jsonl"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (IMAGES / "ready").is_file(), reason="run tests/live/benchmarks/prepare.sh first"),
]


def played(policy: str, folder: Path) -> dict[str, dict[str, object]]:
    """Records by item of one evaluation."""
    words = [str(HOME / "venv/bin/hermes-rl"), "evaluate", "swe_bench", "--env.dataset", str(ROWS), "--out", "run"]
    words += ["--env.image", f"oci:{IMAGES}/{{instance_id}}:1", "--openai.options.policy", policy]
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(HERE)}
    done = subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    records = map(json.loads, (folder / "run" / "rollouts.jsonl").read_text().splitlines())
    return {record["item_id"].removeprefix("hermes-rl__").removesuffix("-1"): record for record in records}


def test_what_works_must_go_on_working(tmp_path: Path) -> None:
    found = played("swe_agents:half", tmp_path)
    assert {name: record["verifier_score"] for name, record in found.items()} == {"slugs": 0.0, "intervals": 0.0}
    assert found["slugs"]["reward_components"]["verifier/fail_to_pass"] == 1.0  # type: ignore[index]
    assert found["slugs"]["reward_components"]["verifier/pass_to_pass"] == 0.75  # type: ignore[index]
    assert found["intervals"]["reward_components"]["verifier/fail_to_pass"] == 0.0  # type: ignore[index]
    assert found["intervals"]["reward_components"]["verifier/pass_to_pass"] == 1.0  # type: ignore[index]


@pytest.mark.parametrize("policy", ["other_tests", "breaks_git", "exits_early"])
def test_a_cheat_gets_nothing(policy: str, tmp_path: Path) -> None:
    found = played(f"swe_agents:{policy}", tmp_path)
    assert {name: record["verifier_score"] for name, record in found.items()} == {"slugs": 0.0, "intervals": 0.0}
    assert {record["outcome"] for record in found.values()} == {"agent_fault" if policy == "breaks_git" else "finished"}
