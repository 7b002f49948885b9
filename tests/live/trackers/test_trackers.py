"""The real trackers get what a run did, and their own readers give it back. See tests/live/trackers/prepare.sh."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from support.atropos_api import Trainer, run_api
from support.learn_program import tiny_config

HOME = Path(__file__).resolve().parents[3] / ".tools" / "trackers"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (HOME / "ready").is_file(), reason="no trackers: bash tests/live/trackers/prepare.sh"),
]
TRACKERS = ("--env.trackers", '["wandb", "tensorboard", "mlflow", "trackio"]')
SMALL = ("--env.group_size", "2", "--env.groups_at_once", "1", "--env.levels", "[0]")

READ = """
import json, sqlite3, sys
from pathlib import Path
folder, names, found = Path(sys.argv[1]), sys.argv[2:], {}
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
[events] = folder.rglob("events.out.tfevents.*")
board = EventAccumulator(str(events)); board.Reload()
found["tensorboard"] = {name: [[e.step, e.value] for e in board.Scalars(name)] for name in names}
from mlflow.tracking import MlflowClient
client = MlflowClient()
[run] = client.search_runs([client.get_experiment_by_name("hermes-rl").experiment_id])
history = lambda name: sorted([m.step, m.value] for m in client.get_metric_history(run.info.run_id, name))
found["mlflow"] = {name: history(name) for name in names}
[store] = (folder / "trackio").rglob("hermes-rl.db")
rows = sqlite3.connect(store).execute("select step, metrics from metrics order by step").fetchall()
told = [[step, json.loads(metrics)] for step, metrics in rows]
found["trackio"] = {name: [[step, own[name]] for step, own in told if name in own] for name in names}
from wandb.proto.wandb_internal_pb2 import Record
[file] = folder.rglob("offline-run-*/*.wandb")
data, at, part, rows = file.read_bytes(), 7, b"", []
while at + 7 < len(data):  # LevelDB's log: blocks of 32 kB, records with checksum, length and kind (1 and 4 end one)
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
    length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
    part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
    if kind in (1, 4):
        record, part = Record.FromString(part), b""
        if record.WhichOneof("record_type") == "history":
            own = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append({key: json.loads(value) for key, value in own.items()})
found["wandb"] = {name: [[own["_step"], own[name]] for own in rows if name in own] for name in names}
print(json.dumps(found))
"""

Figures = dict[str, list[tuple[int, float]]]


class Tracked:
    """A folder in which runs are made with all trackers, and read with the trackers' own readers."""

    def __init__(self, folder: Path) -> None:
        own = {"MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(), "TRACKIO_DIR": str(folder / "trackio")}
        own |= {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true", "XDG_STATE_HOME": str(folder / "state")}
        self.folder, self.environ = folder, {**os.environ, **own}

    def start(self, *words: str) -> subprocess.Popen[str]:
        command = [str(HOME / "venv/bin/hermes-rl"), *words, *TRACKERS]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, cwd=self.folder, env=self.environ, stdout=pipe, stderr=pipe, text=True)

    def end(self, process: subprocess.Popen[str]) -> None:
        _, said = process.communicate()
        assert process.returncode == 0, said[-3000:]
        assert "is left out" not in said, said[-3000:]

    def read(self, names: Sequence[str]) -> Figures:
        """What every tracker holds under these names; all hold the same."""
        command = [str(HOME / "venv/bin/python"), "-c", READ, str(self.folder), *names]
        done = subprocess.run(command, cwd=self.folder, env=self.environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        assert set(told) == {"tensorboard", "mlflow", "trackio", "wandb"}
        exact: Figures = {name: [tuple(entry) for entry in own] for name, own in told["mlflow"].items()}
        for tracker, figures in told.items():
            for name, own in figures.items():
                assert own == [pytest.approx(entry, rel=1e-6) for entry in exact[name]], (tracker, name)
        return exact


@pytest.fixture
def tracked(tmp_path: Path) -> Tracked:
    return Tracked(tmp_path)


@pytest.mark.parametrize(
    ("verb", "sizes"),
    [("process", ("--env.total_steps", "3")), ("evaluate", ("--env.eval_items", "3", "--env.eval_samples", "2"))],
)
def test_process_and_evaluate(tracked: Tracked, verb: str, sizes: tuple[str, ...]) -> None:
    tracked.end(tracked.start(verb, "terminal_tasks", "--out", "out", *SMALL, *sizes))
    found = tracked.read(["run/done", f"{verb}/rollouts"])
    assert found == {"run/done": [(1, 1.0), (2, 2.0), (3, 3.0)], f"{verb}/rollouts": [(3, 6.0)]}


def test_serve(tracked: Tracked) -> None:
    with run_api() as api:
        trainer = Trainer(api.url, batch_size=4, max_token_len=32_768)
        trainer.register()
        own = ("--env.rollout_server_url", api.url, "--env.total_steps", "3", "--env.steps_per_eval", "0")
        process = tracked.start("serve", "terminal_tasks", *SMALL, *own, "--env.ensure_scores_are_not_same", "false")
        try:
            trainer.pull_until(3, timeout_s=300.0)
            tracked.end(process)
        finally:
            process.kill()
    [(name, steps)] = tracked.read(["train/completion_lengths"]).items()
    assert [step for step, _ in steps] == sorted({step for step, _ in steps})
    assert steps, name


def test_learn(tracked: Tracked) -> None:
    tiny_config(tracked.folder / "tiny.yaml", steps=2, first_layer=1)
    tracked.end(tracked.start("learn", "--config", "tiny.yaml", "--out", "out"))
    lines = [json.loads(line) for line in (tracked.folder / "out/metrics.jsonl").read_bytes().splitlines()]
    rewards = [(line["step"], line["reward"]) for line in lines if line["event"] == "step"]
    held_out = [(line["step"], line["success"]) for line in lines if line["event"] == "evaluation"]
    assert [step for step, _ in rewards] == [1, 2]
    assert [step for step, _ in held_out] == [0, 2]
    found = tracked.read(["learn/reward", "held_out/success"])
    assert found["learn/reward"] == [pytest.approx(entry) for entry in rewards]
    assert found["held_out/success"] == [pytest.approx(entry) for entry in held_out]
