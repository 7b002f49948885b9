"""The real Harbor with our slots, against `harbor:PATH`: the same tasks, agents and rewards. Prepared by prepare.sh."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support import image_registry

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
HOME = ROOT / ".tools" / "harbor"
TASKS = ROOT / "examples" / "harbor_tasks"
IMAGE = ROOT / ".tools" / "benchmarks" / "swe_bench" / "hermes-rl__slugs-1"

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


def by_harbor(agent: str, folder: Path, image: str) -> tuple[dict[str, float], float]:
    place = "environments.trainers.harbor:SlotEnvironment"
    command = [str(HOME / "venv/bin/harbor"), "run", "-p", str(TASKS), "-a", agent, "--env", place, "--yes"]
    seconds = run([*command, "--ek", f"image={image}", "-n", "4", "-o", str(folder), "--job-name", "job"], folder)
    found = {}
    for path in (folder / "job").glob("*/result.json"):
        trial = json.loads(path.read_text())
        assert trial["exception_info"] is None
        found[Path(trial["task_id"]["path"]).name] = trial["verifier_result"]["rewards"]["reward"]
    return found, seconds


def by_us(policy: str, folder: Path, *more: str) -> tuple[dict[str, float], float]:
    program = str(Path(sys.executable).parent / "hermes-rl")
    flags = ["--openai.options.policy", policy, "--out", str(folder / "ours"), *more]
    seconds = run([program, "evaluate", f"harbor:{TASKS}", *flags], folder)
    records = map(json.loads, (folder / "ours" / "rollouts.jsonl").read_text().splitlines())
    return {record["item_id"]: record["verifier_score"] for record in records}, seconds


@pytest.fixture(params=["host", "image"])
def image(request: pytest.FixtureRequest) -> str:
    """Slots without an image, and with a real one: Debian with Python, made by tests/live/benchmarks/prepare.sh."""
    if request.param == "image":
        if not IMAGE.is_dir():
            pytest.skip("there is no image: run tests/live/benchmarks/prepare.sh")
        return f"oci:{IMAGE}:1"
    return "host"


@pytest.mark.parametrize(
    ("agent", "policy", "mean"),
    [("oracle", "oracle", 1.0), ("nop", "nop", 0.0), ("half_right:HalfRight", "half_right:policy", None)],
)
def test_harbor_and_we_give_the_same_rewards(
    agent: str, policy: str, mean: float | None, image: str, tmp_path: Path
) -> None:
    theirs, their_seconds = by_harbor(agent, tmp_path, image)
    ours, our_seconds = by_us(policy, tmp_path, "--env.image", image)
    both = [f"{sum(found.values()) / len(found):.4f}" for found in (theirs, ours)]
    where = image.partition(":")[0]
    print(f"\n| {policy} | {where} | {both[0]} | {both[1]} | {their_seconds:.1f} s | {our_seconds:.1f} s |")
    assert len(theirs) == 12
    assert ours == pytest.approx(theirs)
    if mean is not None:
        assert set(ours.values()) == {mean}
    else:
        assert 0 < sum(ours.values()) < 12
        assert any(0 < value < 1 for value in ours.values())


def test_the_tasks_run_in_the_image_that_they_name(tmp_path: Path) -> None:
    """`python:3.12-slim` as the tasks have it, from a registry on this machine that stands in for docker.io."""
    if image_registry.PROGRAM is None or shutil.which("skopeo") is None or not IMAGE.is_dir():
        pytest.skip("docker-registry, skopeo or the image (tests/live/benchmarks/prepare.sh) is not there")
    with image_registry.running_registry(tmp_path) as registry:
        to = f"docker://{registry.host}/library/python:3.12-slim"
        subprocess.run(["skopeo", "copy", "-q", "--dest-tls-verify=false", f"oci:{IMAGE}:1", to], check=True)
        mirrors = json.dumps({"docker.io": [registry.base]})
        found, _ = by_us("oracle", tmp_path, "--env.pool.images.mirrors", mirrors)
    assert set(found.values()) == {1.0}
    assert len(found) == 12
    assert "/v2/library/python/manifests/" in registry.log.read_text()
