"""README and WRITING.md are true: the example runs as it stands, and what it leaves is exact."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import environments
from agent_loop.verify import verify_lines
from environments.launch import load_environment

ROOT = Path(environments.__file__).parents[1]


def block(page: str, language: str, begins: str = "") -> str:
    found = re.search(rf"```{language}\n({begins}.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_environment_runs_as_written(tmp_path: Path) -> None:
    (tmp_path / "lines.py").write_text(block("README.md", "python"))
    (tmp_path / "lines.yaml").write_text(block("environments/WRITING.md", "yaml"))
    first = block("README.md", "bash", "python ").splitlines()[0].split()
    assert first[0] == "python"
    state = ["--env.pool.state_dir", str(tmp_path / "state")]
    done = subprocess.run(
        [sys.executable, *first[1:], *state], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (tmp_path / "runs/lines/rollouts.jsonl").read_bytes().splitlines()
    assert len(lines) == 8
    assert verify_lines(lines).ok
    env = load_environment(tmp_path / "lines.yaml")
    assert (env.name, env.config.group_size) == ("lines", 8)
