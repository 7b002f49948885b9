"""Harbor's own models and Inspect's own reader take what `export` writes. Prepared by tests/live/exports/prepare.sh."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from environments.apps.cli import main as cli
from support.records import make_run, write_run
from support.token_records import tokenized

HOME = Path(__file__).resolve().parents[3] / ".tools" / "readers"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="no readers here: run `make readers`"),
]

HARBOR = """
import json, sys
from pathlib import Path
from harbor.utils.trajectory_validator import TrajectoryValidator
from harbor.models.trajectories import Trajectory
found = {}
for path in sorted(Path(sys.argv[1]).glob("*.json")):
    validator = TrajectoryValidator()
    assert validator.validate(path), (path, validator.errors)
    own = Trajectory.model_validate_json(path.read_text())
    ids = [len(s.metrics.completion_token_ids or []) for s in own.steps if s.metrics]
    found[own.trajectory_id] = [own.final_metrics.extra["verifier_score"], sum(ids)]
print(json.dumps(found))
"""
INSPECT = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log
found = {}
for place in list_eval_logs(sys.argv[1]):
    assert read_eval_log(place, header_only=True).status == "success"
    log = read_eval_log(place)
    scores = {s.metadata["rollout_id"]: s.scores["verifier"].as_float() if s.scores else None for s in log.samples}
    found[log.eval.model] = {
        "mean": log.results.scores[0].metrics["mean"].value,
        "scores": scores,
        "errors": sum(s.error is not None for s in log.samples),
        "messages": sum(len(s.messages) for s in log.samples),
    }
print(json.dumps(found))
"""


def read(name: str, program: str, folder: Path) -> dict:
    words = [str(HOME / name / "bin" / "python"), "-c", program, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_run(folder / "rollouts.jsonl", [tokenized(record) for record in make_run(items=6, samples=3)])
    return folder


def test_harbor_reads_every_trajectory(run: Path) -> None:
    assert cli.main(["export", str(run), "--to", "atif"]) == 0
    records = [tokenized(record) for record in make_run(items=6, samples=3)]
    assert read("harbor", HARBOR, run / "atif") == {
        r.rollout_id: [r.verifier_score, sum(len(call.sampled_ids) for call in r.sampled_calls)] for r in records
    }


def test_inspect_reads_every_log(run: Path) -> None:
    assert cli.main(["export", str(run), "--to", "inspect"]) == 0
    records = make_run(items=6, samples=3)
    found = read("inspect", INSPECT, run / "inspect")
    assert set(found) == {record.policy for record in records}
    for policy, log in found.items():
        own = [record for record in records if record.policy == policy]
        scores = [record.verifier_score for record in own if record.verifier_score is not None]
        assert log["mean"] == pytest.approx(sum(scores) / len(scores))
        assert log["scores"] == {record.rollout_id: record.verifier_score for record in own}
        assert log["errors"] == sum(not record.trainable for record in own)
        assert log["messages"] == sum(len(record.messages) for record in own)
