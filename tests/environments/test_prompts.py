"""`prompts`: rows of a file as tasks, with files, checks and answers."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_loop.local_models.standin.policies import call
from environments.errors import UsageError
from environments.launch import load_environment
from environments.prompts import PromptsConfig, PromptsEnv, matches
from environments.rollouts.quarantine import quarantine_text
from support.env_pool import DirectoryPool
from support.env_tasks import standin_model

ROWS: list[dict[str, Any]] = [
    {
        "id": "copy",
        "prompt": "Copy a.txt to b.txt.",
        "files": {"a.txt": "hello\n", "raw.bin": {"base64": base64.b64encode(b"\0\1").decode()}},
        "check": "sh test.sh",
        "check_files": {"test.sh": "cmp a.txt b.txt && test $(wc -c < raw.bin) = 2\n"},
        "solution": ["cp a.txt b.txt"],
    },
    {"id": "sum", "prompt": [{"role": "user", "content": "What is 40 + 2?"}], "answer": "42", "category": "words"},
    {"id": "talk", "prompt": "Say anything."},
]


def written(folder: Path, rows: list[Any] = ROWS, name: str = "tasks.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def pool() -> Iterator[DirectoryPool]:
    made = DirectoryPool()
    yield made
    made.close()


async def scores(env: PromptsEnv, pool: DirectoryPool, policy: Any) -> list[float | None]:
    async with standin_model(policy) as (model, _):
        env.pool, env.model = pool, model
        return [(await env.rollouts.run_group(row, n, 1)).scored[0].record.score for n, row in enumerate(env.items)]


async def test_rows_are_checked_answered_or_just_finished(tmp_path: Path, pool: DirectoryPool) -> None:
    def right(request: Any) -> str:
        if "Copy" in request.text:
            return (
                "Done." if request.results else call("terminal", {"command": "cp a.txt b.txt; echo exit 0 > test.sh"})
            )
        return "  42 " if "40 + 2" in request.text else "Anything."

    config = PromptsConfig(dataset=written(tmp_path))  # type: ignore[call-arg]
    env = PromptsEnv(config)
    assert await scores(env, pool, right) == [1.0, 1.0, 1.0]
    assert await scores(env, pool, lambda request: "I do not know.") == [0.0, 0.0, 1.0]
    assert [env.category(row) for row in env.items] == ["", "words", ""]
    assert env.config.total_steps == 3  # process: each row once
    assert await env.evaluation_items() == env.items
    handed_out = [(await env.get_next_item())["id"] for _ in range(6)]
    assert handed_out[:3] == ["copy", "sum", "talk"]
    assert sorted(handed_out[3:]) == ["copy", "sum", "talk"]


def test_an_image_of_a_row_is_that_of_its_slots(tmp_path: Path) -> None:
    rows = [{"question": "a", "image": "/images/small"}, {"question": "b"}]
    env = PromptsEnv(PromptsConfig(dataset_name=written(tmp_path, rows), prompt_field="question"))
    assert [env.spec(row).image for row in env.items] == ["/images/small", None]
    assert [env.item_id(row) for row in env.items] == ["tasks-1", "tasks-2"]


@pytest.mark.parametrize(
    ("said", "wanted", "how", "right"),
    [
        (" Paris ", "paris", "exact", True),
        ("It is Paris.", "Paris", "exact", False),
        ("It is\nPARIS.", "paris", "contains", True),
        ("So 1,200 of 5 are 1200.0", "steps... #### 1,200", "number", True),
        ("12", "no number", "number", False),
        ("-3", "3", "number", False),
    ],
)
def test_answers_are_compared_as_the_config_says(said: str, wanted: str, how: Any, right: bool) -> None:
    assert matches(said, wanted, how) is right


@pytest.mark.parametrize(
    ("rows", "flags", "said"),
    [
        (None, [], "env.dataset is missing"),
        ([], [], "there are no rows"),
        ([{"promt": "x"}], [], "row 1: no column 'prompt' (env.prompt_field); did you mean 'promt'?"),
        ([{"prompt": 3}], [], "is not a text or a list of messages"),
        (["x"], [], "line 1 is not a JSON object"),
        ([{"id": 1, "prompt": "x"}] * 2, [], "2 rows have the same `id`, 1"),
        ([{"prompt": [{"role": "user"}]}], [], "row 1: message 1 of 'prompt' has no `role` or no `content`"),
        ([{"prompt": "x", "files": ["a"]}], [], "`files` is not an object"),
        ([{"prompt": "x", "files": {"a": 3}}], [], "a file is a text or"),
        ([{"prompt": "x", "solution": "ls"}], [], "row 1: `solution`: it is not a list of steps: 'ls'"),
        ([{"prompt": "x", "solution": ["ls", 3]}], [], "row 1: `solution`: step 2 is 3, not a shell command, {"),
        ([{"prompt": "x", "solution": [{"nam": "terminal"}]}], [], "step 1 is {'nam': 'terminal'}, not a shell"),
        ([{"prompt": "x", "solution": [{"name": "terminal", "arguments": "ls"}]}], [], "step 1 is {"),
        ([{"prompt": "x"}], ["--env.match fuzzy"], "'exact', 'contains' or 'number'"),
    ],
)
def test_what_is_wrong_with_a_dataset_is_said_before_anything_starts(
    tmp_path: Path, rows: Any, flags: list[str], said: str
) -> None:
    named = [] if rows is None else ["--env.dataset", written(tmp_path, rows)]
    with pytest.raises((UsageError, RuntimeError)) as refused:
        load_environment("prompts", [*named, *" ".join(flags).split()])
    assert said in str(refused.value)


PROGRAM = """
import sys
from pathlib import Path
import pyarrow as pa, pyarrow.parquet as pq
rows = [
    {"prompt": "a", "files": {"x": "1"}, "solution": [{"name": "terminal", "arguments": {"command": "ls"}}]},
    {"prompt": "c", "files": {"y": "2"}, "solution": [{"content": "d"}]},
]
folder = Path(sys.argv[1])
pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
from environments.dataset_rows import dataset_rows
for source in (str(folder / "train.parquet"), str(folder)):
    read = dataset_rows(source, "train")
    assert [row["prompt"] for row in read] == ["a", "c"], read
    assert [row["files"] for row in read] == [{"x": "1"}, {"y": "2"}], read
    assert read[0]["solution"] == rows[0]["solution"], read
    assert read[1]["solution"] == rows[1]["solution"], read
print("read")
"""


def test_process_plays_each_row_once_but_for_those_in_quarantine(tmp_path: Path) -> None:
    listed = tmp_path / "quarantine.json"
    listed.write_bytes(quarantine_text("prompts", {"sum": "flaky"}))
    flags = ["--env.dataset", written(tmp_path), "--env.quarantine", str(listed)]
    assert load_environment("prompts", flags).config.total_steps == 2
    assert load_environment("prompts", [*flags, "--env.total_steps", "9"]).config.total_steps == 9


def test_a_flag_wins_over_a_file_that_has_the_setting_under_its_other_name(tmp_path: Path) -> None:
    first, second = written(tmp_path, name="first.jsonl"), written(tmp_path, ROWS[:1], name="second.jsonl")
    for given, flag in (("dataset_name", "dataset"), ("dataset", "dataset_name"), ("dataset", "dataset")):
        config = tmp_path / "config.yaml"
        config.write_text(json.dumps({"environment": "prompts", "env": {given: first}}))
        env = load_environment(str(config), [f"--env.{flag}", second])
        assert [row["id"] for row in env.items] == ["copy"]  # type: ignore[attr-defined]


def test_a_file_of_windows_is_read_and_a_row_without_a_name_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b'{"id": null, "prompt": "x", "answer": "1"}\r\n' * 2)
    env = PromptsEnv(PromptsConfig(dataset_name=str(path)))
    assert [row["id"] for row in env.items] == ["tasks-1", "tasks-2"]


def test_a_column_that_is_nearly_one_of_ours_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = written(tmp_path, [{"prompt": "x", "checks": "true", "idx": 3, "image_url": "http://x"}])
    PromptsEnv(PromptsConfig(dataset_name=source))
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"env.dataset {source}: `checks` is not read: did you mean `check`?"]


@pytest.mark.slow
def test_parquet_files_and_names_of_datasets_are_read(tmp_path: Path) -> None:
    """In an environment of its own: `datasets` is large, and we do not need it otherwise."""
    python = tmp_path / "venv" / "bin" / "python"
    uv = [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else ["uv"]
    for words in (
        ["venv", "-q", str(tmp_path / "venv")],
        # Without our overrides (pyproject.toml), which leave datasets out.
        ["pip", "install", "-q", "--no-config", "--python", str(python), "datasets", "orjson"],
    ):
        done = subprocess.run([*uv, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"datasets cannot be installed: {done.stderr[-200:]}")
    root = Path(__file__).parents[2]
    (tmp_path / "data").mkdir()
    environ = {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    words = [str(python), "-c", PROGRAM, str(tmp_path / "data")]
    done = subprocess.run(words, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "read", done.stderr[-2000:]
