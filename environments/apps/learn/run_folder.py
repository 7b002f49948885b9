"""The run directory of `learn`: what is in it, and what is kept when a run is resumed. One process at a time writes it.

config.yaml     the settings as run               rollouts.jsonl            training rollouts
metrics.jsonl   a line per step and evaluation    evaluations/step-N.jsonl  their rollouts
adapter.gguf    the newest weights                checkpoints/              what --resume continues from
report.html     curves and examples               logs/                     logs of the processes
rollouts.html   every rollout, by step            *status.json, figures.jsonl   what `view --live` and `top` tell

With TRL: weights/ holds the newest weights as a GGUF, adapter/ the adapter in PEFT's form.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any, Self

import orjson
import yaml

from environments.errors import UsageError, writing
from environments.runs.store import append_bytes, locked, whole_lines, write_whole

OWN = (
    *("config.yaml", "serve.yaml", "trainer.json", "rollouts.jsonl", "metrics.jsonl", "adapter.gguf", "report.html"),
    *("rollouts.html", "status.json", "learn_status.json", "figures.jsonl"),
    *("evaluations", "checkpoints", "env_checkpoints", "logs", "trl", "weights", "adapter", "tensorboard", "wandb"),
)
_CHECKPOINT = re.compile(r"step-(\d+)\.npz")


class RunFolder:
    """One run on disk, locked while it is open. `entries` are the lines of its metrics.jsonl."""

    def __init__(self, path: Path, *, resume: bool = False, fresh: bool = False) -> None:
        self.path = path.absolute()
        self.rollouts = self.path / "rollouts.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.report = self.path / "report.html"
        self.entries: list[dict[str, Any]] = []
        self._resume, self._fresh = resume, fresh
        self._lock: int | None = None

    def __enter__(self) -> Self:
        if self._resume and not ((self.path / "config.yaml").exists() or self.metrics.exists()):
            raise UsageError(f"{self.path} holds no run to resume: leave out --resume, or name its folder with --out")
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = locked(self.path / ".lock")
        try:
            self._prepare()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def saved_step(self) -> int | None:
        """The step of the last checkpoint: a resumed run continues after it."""
        last = self.path / "checkpoints" / "last"
        found = _CHECKPOINT.fullmatch(last.resolve().name) if last.exists() else None
        return int(found[1]) if found else None

    def evaluation(self, step: int) -> Path:
        """Rollouts of the evaluation after this step."""
        return self.path / "evaluations" / f"step-{step}.jsonl"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    def add(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        append_bytes(self.metrics, orjson.dumps(entry) + b"\n")

    def write_yaml(self, name: str, data: dict[str, Any]) -> Path:
        path = self.path / name
        write_whole(path, yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120).encode())
        return path

    def _prepare(self) -> None:
        if self._fresh:
            for name in OWN:
                path = self.path / name
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        if self.metrics.exists() and not self._resume:
            raise UsageError(
                f"{self.path} holds a run: --resume goes on with it, --fresh starts over, --out names another place"
            )
        saved = self.saved_step or 0
        self.entries = [entry for entry in whole_lines(self.metrics) if entry["step"] <= saved]
        if self._resume and self.metrics.exists():
            write_whole(self.metrics, b"".join(orjson.dumps(entry) + b"\n" for entry in self.entries))


def read_entries(folder: Path) -> list[dict[str, Any]]:
    """metrics.jsonl of a run; UsageError when there is none."""
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UsageError(f"{folder} is not a run of `hermes-rl learn`: it has no metrics.jsonl")
    return whole_lines(path)
