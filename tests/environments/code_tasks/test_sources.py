from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from environments.code_tasks import load_tasks
from environments.code_tasks.datasets import DatasetUnavailable
from support.local_context import LocalContext

ROW = {
    "task_id": "Python/0",
    "prompt": 'def add(a, b):\n    """Add."""\n',
    "canonical_solution": "    return a + b\n",
    "buggy_solution": "    return a - b\n",
    "test": "def check(add):\n    assert add(1, 2) == 3\n\ncheck(add)\n",
    "entry_point": "add",
    "import": "",
    "test_setup": "",
}


def write(path: Path, *rows: dict) -> str:
    data = "\n".join(json.dumps(row) for row in rows).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.mark.parametrize("name", ["pack.jsonl", "pack.jsonl.gz"])
async def test_a_pack_row_with_a_bug_becomes_a_task_to_fix(name: str, tmp_path: Path) -> None:
    (task,) = load_tasks(write(tmp_path / name, ROW))
    assert (task.id, task.kind) == ("code:pack:Python_0", "fix")
    assert "has a bug" in task.prompt
    ctx = LocalContext.create(tmp_path / "work")
    await task.prepare(ctx)
    assert b"a - b" in await ctx.read_file("solution.py")
    assert (await task.verify(ctx)).score == 0.0
    await ctx.exec(task.solution[0])
    assert (await task.verify(ctx)).score == 1.0


def test_a_row_without_a_bug_is_a_task_to_write(tmp_path: Path) -> None:
    plain = {key: value for key, value in ROW.items() if key != "buggy_solution"}
    (task,) = load_tasks(write(tmp_path / "x.jsonl", plain))
    assert task.kind == "write"
    assert dict(task.files)["solution.py"] == ROW["prompt"]


def test_no_hidden_test_and_no_solution_is_laid_out(tmp_path: Path) -> None:
    (task,) = load_tasks(write(tmp_path / "x.jsonl", ROW))
    shown = task.prompt + "".join(text for _, text in task.files)
    assert "check" not in shown
    assert "a + b" not in shown


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("nowhere.jsonl", "cannot read nowhere.jsonl"),
        ("humaneval", "unknown source 'humaneval'"),
    ],
)
def test_a_source_that_cannot_be_read_says_so(source: str, sentence: str) -> None:
    with pytest.raises(DatasetUnavailable, match=sentence):
        load_tasks(source)


def test_bad_rows_and_empty_selections_are_named(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n{oops\n")
    with pytest.raises(DatasetUnavailable, match="line 2 is not JSON"):
        load_tasks(str(tmp_path / "bad.jsonl"))
    with pytest.raises(DatasetUnavailable, match="has no entry_point"):
        load_tasks(write(tmp_path / "x.jsonl", {key: value for key, value in ROW.items() if key != "entry_point"}))
    with pytest.raises(DatasetUnavailable, match="no tasks for split 'train'"):
        load_tasks(write(tmp_path / "y.jsonl", ROW), "train")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="the datasets package is installed")
def test_a_hub_dataset_without_the_package_says_what_to_install() -> None:
    with pytest.raises(DatasetUnavailable, match="pip install datasets"):
        load_tasks("bigcode/humanevalpack")
