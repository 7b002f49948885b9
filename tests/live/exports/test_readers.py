"""The formats' own readers take what `export` writes. Prepared by tests/live/exports/prepare.sh."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from environments.apps.cli import main as cli
from support.records import make_run, write_run
from support.token_records import tokenized

ROOT = Path(__file__).resolve().parents[3]
HOME = ROOT / ".tools" / "readers"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (HOME / "ready-openenv").is_file(), reason="no readers here: run `make readers`"),
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
OPENENV = """
import json, sys
from pathlib import Path
from openenv.core.harness.training import TrainingTrace
found = {}
for line in (Path(sys.argv[1]) / "train.jsonl").read_text().splitlines():
    turns = TrainingTrace.model_validate_json(line).turns
    found[turns[0].metadata["rollout_id"]] = [sum(sum(turn.loss_mask) for turn in turns), turns[0].metadata["score"]]
print(json.dumps(found))
"""
PARQUET = """
import json, sys
from pathlib import Path
from environments.apps.cli import main as cli
from environments.runs import training_data
training_data.ROWS_AT_ONCE = 10
assert cli.main(["export", sys.argv[1], "--to", "parquet"]) == 0
from pyarrow import parquet
table = parquet.ParquetFile(Path(sys.argv[1]) / "parquet" / "train.parquet")
assert table.num_row_groups > 1
print(json.dumps(table.read().to_pylist()))
"""


def read(name: str, program: str, folder: Path, **environment: str) -> Any:
    words = [str(HOME / name / "bin" / "python"), "-c", program, str(folder)]
    env = os.environ | environment
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False, env=env)
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


def test_openenv_reads_every_trace(run: Path) -> None:
    assert cli.main(["export", str(run), "--to", "openenv"]) == 0
    records = [tokenized(record) for record in make_run(items=6, samples=3) if record.trainable]
    assert read("openenv", OPENENV, run / "openenv") == {
        r.rollout_id: [sum(len(call.sampled_ids) for call in r.sampled_calls), r.score] for r in records
    }


def test_pyarrow_reads_the_table_row_group_by_row_group(run: Path) -> None:
    records = [tokenized(record) for record in make_run(items=6, samples=3) if record.trainable]
    ours = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    rows = read("openenv", PARQUET, run, PYTHONPATH=ours)
    assert [row["rollout_id"] for row in rows] == [record.rollout_id for record in records]
    for row, record in zip(rows, records, strict=True):
        assert row["tokens"] == [segment.tokens for segment in record.segments]
        for segment, mask, logprobs in zip(record.segments, row["mask"], row["logprobs"], strict=True):
            assert mask == [int(value != -100) for value in segment.masks]
            assert logprobs == [value if kept else 0.0 for value, kept in zip(segment.logprobs, mask, strict=True)]
        assert len(json.loads(row["messages"])) == len(record.messages)
