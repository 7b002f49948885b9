"""A killed run leaves no folders of wandb: the next start removes them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

CODE = """
import os, signal, sys
import environments.base
import environments.atropos.wandb_folders
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run(tmp_path, end):
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-P", "-c", CODE, end], env=environment, check=False, capture_output=True)
    return done.returncode, [path.name for path in Path(tmp_path).rglob("*wandb*")]


def test_the_next_start_removes_what_wandb_of_a_killed_run_left(tmp_path):
    code, left = run(tmp_path, "killed")
    assert code == -signal.SIGKILL
    assert len(left) >= 2
    assert [path.name for path in tmp_path.iterdir()] == [f"hermes-rl-folders-{os.getuid()}"]
    assert run(tmp_path, "proper") == (0, [])
