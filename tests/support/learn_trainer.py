"""A trainer without a model: speaks to run-api and the front as the reference trainer does, and learns nothing.

`python learn_trainer.py [--die-at STEP] SETTINGS.json`
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from environments.apps.reference_trainer.trainer_api import ModelFront, RunApi
from environments.apps.reference_trainer.trainer_settings import TrainerJob


def report(**event: object) -> None:
    print(json.dumps(event), flush=True)


def save(folder: Path, step: int) -> None:
    folder.mkdir(exist_ok=True)
    (folder / f"step-{step:04}.npz").write_bytes(b"")
    (folder / "last").unlink(missing_ok=True)
    (folder / "last").symlink_to(f"step-{step:04}.npz")


def main() -> int:
    die_at = int(sys.argv[2]) if sys.argv[1] == "--die-at" else -1
    job = TrainerJob.model_validate_json(Path(sys.argv[-1]).read_text())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    api, front = RunApi(job.run_api_url, job.groups_per_step), ModelFront(job.model_url)
    last = job.run_dir / "checkpoints" / "last"
    step = int(last.resolve().stem.removeprefix("step-")) if job.resume else 0
    if job.resume:
        front.load("", str(step))
    api.register(job.batch_size, job.max_token_len, step, job.steps, str(job.run_dir))
    print("a library says something")
    report(event="ready", step=step)
    while step < job.steps:
        while not api.batch_is_there():
            time.sleep(0.05)
        front.pause()
        batch = api.take()
        step += 1
        report(event="batch", step=step)
        if step == die_at:
            report(event="error", message="the batch tastes bad")
            return 3
        save(job.run_dir / "checkpoints", step)
        front.load("", str(step))
        scores = [score for group in batch for score in group["scores"]]
        report(event="step", step=step, reward=sum(scores) / len(scores), wait_s=1.0, train_s=0.0, sync_s=1.0)
    report(event="done", step=step)
    return 0


if __name__ == "__main__":
    sys.exit(main())
