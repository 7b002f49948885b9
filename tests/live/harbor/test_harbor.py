"""The real Harbor with our slots, against `harbor:PATH`: the same tasks, agents and rewards. Prepared by prepare.sh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
HOME = ROOT / ".tools" / "harbor"
TASKS = ROOT / "examples" / "harbor_tasks"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="run tests/live/harbor/prepare.sh first"),
]


def run(command: list[str], folder: Path) -> float:
    """Seconds that a command took."""
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTHONPATH": str(HERE)}
    environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else Harbor asks the network for prices first
    began = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return time.monotonic() - began


def by_harbor(agent: str, folder: Path) -> tuple[dict[str, float], float]:
    place = "environments.trainers.harbor:SlotEnvironment"
    command = [str(HOME / "venv/bin/harbor"), "run", "-p", str(TASKS), "-a", agent, "--env", place, "--yes"]
    seconds = run([*command, "--ek", "image=host", "-n", "4", "-o", str(folder), "--job-name", "job"], folder)
    found = {}
    for path in (folder / "job").glob("*/result.json"):
        trial = json.loads(path.read_text())
        assert trial["exception_info"] is None
        found[Path(trial["task_id"]["path"]).name] = trial["verifier_result"]["rewards"]["reward"]
    return found, seconds


def by_us(policy: str, folder: Path) -> tuple[dict[str, float], float]:
    program = str(Path(sys.executable).parent / "hermes-rl")
    flags = ["--env.image", "host", "--openai.options.policy", policy, "--out", str(folder / "ours")]
    seconds = run([program, "evaluate", f"harbor:{TASKS}", *flags], folder)
    records = map(json.loads, (folder / "ours" / "rollouts.jsonl").read_text().splitlines())
    return {record["item_id"]: record["verifier_score"] for record in records}, seconds


@pytest.mark.parametrize(
    ("agent", "policy", "mean"),
    [("oracle", "oracle", 1.0), ("nop", "nop", 0.0), ("half_right:HalfRight", "half_right:policy", None)],
)
def test_harbor_and_we_give_the_same_rewards(agent: str, policy: str, mean: float | None, tmp_path: Path) -> None:
    theirs, their_seconds = by_harbor(agent, tmp_path)
    ours, our_seconds = by_us(policy, tmp_path)
    print(f"{policy}: harbor run {their_seconds:.1f} s, hermes-rl evaluate {our_seconds:.1f} s, rewards {ours}")
    assert len(theirs) == 12
    assert ours == pytest.approx(theirs)
    if mean is not None:
        assert set(ours.values()) == {mean}
    else:
        assert 0 < sum(ours.values()) < 12
        assert any(0 < value < 1 for value in ours.values())
