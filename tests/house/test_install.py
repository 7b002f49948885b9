"""What a fresh install promises: Atropos works with today's newest versions and without the 600 MB it never imports."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def dropped():
    overrides = PROJECT["tool"]["uv"]["override-dependencies"]
    return [line.split(";")[0].strip().replace("-", "_") for line in overrides]


def test_what_we_use_of_atroposlib_imports_without_the_dropped_packages():
    code = (
        f"import sys\nfor name in {dropped()!r}: sys.modules[name] = None\n"
        "import atroposlib.envs.base, atroposlib.api.server\n"
        "import atroposlib.envs.server_handling.managed_server\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_archived_and_internal_dependencies_are_pinned():
    assert "atroposlib==0.4.0" in PROJECT["project"]["dependencies"]


def test_importing_the_rooms_asks_for_no_network_and_no_key():
    rooms = "environments, agent_loop, tool_parsers, sandbox_pool"
    code = (
        "import socket\n"
        "def refuse(*a, **k): raise AssertionError('network at import')\n"
        f"socket.socket.connect = refuse\nimport {rooms}\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"PATH": "/bin"}
    )
    assert done.returncode == 0, done.stderr


def test_the_lock_file_fits_the_project():
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed")
    done = subprocess.run([uv, "lock", "--check", "--offline"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run: uv lock\n{done.stderr}"
