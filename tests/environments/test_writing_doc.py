"""README and WRITING.md are true: the example runs as it stands, acts, scores, and what it leaves is exact."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import environments
from agent_loop.records.record import RolloutRecord
from environments.launch import load_environment

ROOT = Path(environments.__file__).parents[1]


def block(page: str, language: str, begins: str = "") -> str:
    found = re.search(rf"```{language}\n({begins}.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "lines.py").write_text(block("README.md", "python"))
    return tmp_path


def shell(folder: Path, commands: str) -> subprocess.CompletedProcess[str]:
    """Run a block of a page as a reader would: `python` and `hermes-rl` are those of this environment."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "XDG_STATE_HOME": str(folder / "state")}
    command = ["bash", "-euc", commands]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=110)


def rollouts(folder: Path) -> list[RolloutRecord]:
    lines = (folder / "runs/lines/rollouts.jsonl").read_bytes().splitlines()
    return [RolloutRecord.from_json(line) for line in lines]


def test_the_example_environment_acts_and_scores_as_written(folder: Path) -> None:
    done = shell(folder, block("README.md", "bash", "python "))
    assert done.returncode == 0, done.stderr[-3000:]
    records = rollouts(folder)
    assert len(records) == 8
    assert all(record.turns and record.has_tokens for record in records)
    assert any(record.tool_calls for record in records)
    scores = [record.score for record in records]
    assert max(scores) == 1.0
    assert min(scores) < 1.0  # a group whose scores are all equal teaches nothing
    assert "8 rollouts, 8 with tokens" in done.stdout


def test_the_yaml_of_the_example_loads(folder: Path) -> None:
    (folder / "lines.yaml").write_text(block("environments/WRITING.md", "yaml"))
    env = load_environment(folder / "lines.yaml")
    assert (env.name, env.config.group_size) == ("lines", 8)


def test_a_first_prompt_that_does_not_fit_is_a_mistake_of_the_settings(folder: Path) -> None:
    done = shell(folder, "python lines.py process --env.total_steps 2 --env.max_token_length 2048 --out runs/lines")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert re.search(r"needs \d+ tokens.* 1536 are allowed.*env.max_token_length \(now 2048\)", last), done.stderr
    assert "Traceback" not in done.stderr


def test_verify_says_when_there_is_nothing_to_verify(folder: Path) -> None:
    empty = RolloutRecord("r", "g", "lines", "i", "context_overflow", trainable=False, messages=[])
    (folder / "empty.jsonl").write_bytes(empty.to_json() + b"\n")
    done = shell(folder, "hermes-rl verify empty.jsonl")
    assert done.returncode == 2
    assert "nothing to verify" in done.stderr
