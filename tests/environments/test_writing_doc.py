"""The README's example, used wrongly: what is said to people who change it. Used rightly: tests/house/test_docs.py."""

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
from support.markdown_pages import blocks

ROOT = Path(environments.__file__).parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for page in (ROOT / "README.md", ROOT / "docs" / "tutorial.md"):
        for block in blocks(page):
            if block.file:
                (tmp_path / block.file).write_text(block.text)
    return tmp_path


def shell(folder: Path, commands: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**os.environ, "PATH": path, "XDG_STATE_HOME": str(folder / "state")}
    command = ["bash", "-euc", commands]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False)


def test_the_yaml_of_the_tutorial_loads_its_environment(folder: Path) -> None:
    env = load_environment(folder / "rename.yaml")
    assert (env.name, env.config.group_size) == ("rename", 8)


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
