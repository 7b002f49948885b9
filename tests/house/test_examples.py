"""Every example runs as its first lines say, acts, and scores."""

from __future__ import annotations

import gc
import logging
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hermes_rl import RolloutRecord, verify

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ENVIRONMENTS = ("file_task", "code_with_tests", "judge", "evaluation_only")
PROGRAMS = ("own_tools", "user_turns")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; what a program sets for its whole process is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    threshold, level = gc.get_threshold(), logging.getLogger().level
    yield tmp_path
    gc.set_threshold(*threshold)
    logging.getLogger().setLevel(level)


def command_of(path: Path) -> list[str]:
    """The first command in the docstring, as words after the program's name."""
    found = re.search(r"^ *python examples/(\S+)(.*?)(#.*)?$", path.read_text(), re.MULTILINE)
    assert found is not None
    assert found[1] == path.name
    return shlex.split(found[2])


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_an_example_environment_acts_and_scores(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *command_of(path)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    rollouts = folder / "runs" / name / "rollouts.jsonl"
    records = [RolloutRecord.from_json(line) for line in rollouts.read_bytes().splitlines()]
    assert len(records) >= 8
    assert all(record.turns and record.trainable for record in records)
    assert any(record.tool_calls for record in records)
    scores = [record.score for record in records if record.score is not None]
    assert max(scores) > 0
    assert min(scores) < max(scores)  # solved and unsolved ones: a group without both teaches nothing
    assert verify(rollouts).ok


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_example_program_acts_and_scores(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = EXAMPLES / f"{name}.py"
    assert command_of(path) == []
    results, score = runpy.run_path(str(path))["main"]()
    every: list[Any] = results if isinstance(results, list) else [results]
    assert all(result.turns_used > 1 and result.tool_calls and result.has_tokens for result in every)
    assert score == 1.0
    assert "tool calls" in capsys.readouterr().out


def test_two_tools_and_a_judge_take_forty_lines() -> None:
    lines = (EXAMPLES / "judge.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 40


def test_every_example_is_tested_and_listed() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {*ENVIRONMENTS, *PROGRAMS, "own_provider"}  # tests/sandbox_pool/providers/test_own_provider.py
    assert all(f"({name}.py)" in (EXAMPLES / "README.md").read_text() for name in names)
