"""The real trackers get what a run did, and their own readers give it back. See tests/live/trackers/prepare.sh."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

HOME = Path(__file__).resolve().parents[3] / ".tools" / "trackers"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="no trackers: bash tests/live/trackers/prepare.sh"),
]

READ = """
import json, sqlite3, sys
from pathlib import Path
folder, found = Path(sys.argv[1]), {}
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
board = EventAccumulator(str(folder / "out" / "tensorboard")); board.Reload()
found["tensorboard"] = [[e.step, e.value] for e in board.Scalars("run/done")]
from mlflow.tracking import MlflowClient
client = MlflowClient()
[run] = client.search_runs([client.get_experiment_by_name("hermes-rl").experiment_id])
found["mlflow"] = [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, "run/done")]
[store] = (folder / "trackio").rglob("hermes-rl.db")
rows = sqlite3.connect(store).execute("select step, metrics from metrics order by step").fetchall()
told = [[step, json.loads(metrics)] for step, metrics in rows]
found["trackio"] = [[step, own["run/done"]] for step, own in told if "run/done" in own]
found["wandb"] = len(list(folder.rglob("offline-run-*")))
print(json.dumps(found))
"""


def test_every_tracker_has_every_group(tmp_path: Path) -> None:
    own = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}", "TRACKIO_DIR": str(tmp_path / "trackio")}
    environ = {**os.environ, **own, "WANDB_MODE": "offline", "XDG_STATE_HOME": str(tmp_path / "state")}
    command = [str(HOME / "venv/bin/hermes-rl"), "process", "terminal_tasks", "--out", "out", "--env.total_steps", "3"]
    command += ["--env.group_size", "1", "--env.groups_at_once", "1", "--env.levels", "[0]"]
    command += ["--env.trackers", '["wandb", "tensorboard", "mlflow", "trackio"]']
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is left out" not in done.stderr, done.stderr[-3000:]
    read = [str(HOME / "venv/bin/python"), "-c", READ, str(tmp_path)]
    told = subprocess.run(read, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr[-3000:]
    wanted = [[1, 1.0], [2, 2.0], [3, 3.0]]
    found = json.loads(told.stdout.splitlines()[-1])
    assert found == {"tensorboard": wanted, "mlflow": wanted, "trackio": wanted, "wandb": 1}
