"""The wheel holds all it needs and works from any folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The unpacked wheel, put before the checkout on the path: what a user of the wheel imports."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def run_from_elsewhere(installed, tmp_path, code):
    environ = {**os.environ, "PYTHONPATH": str(installed)}
    return subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )


def tracked(*folders):
    listed = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if not name.endswith((".gitkeep", ".gitignore"))]


def test_it_contains_every_tracked_file_of_the_rooms_and_the_configs(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [n for n in tracked("environments", "agent_loop", "tool_parsers", "sandbox_pool") if n not in names]
    assert missing == []
    missing = [n for n in tracked("configs") if f"environments/{n}" not in names]
    assert missing == []


def test_it_contains_no_tests_and_no_scratch(wheel):
    for name in zipfile.ZipFile(wheel).namelist():
        assert (
            name.split("/")[0] in {"environments", "agent_loop", "tool_parsers", "sandbox_pool"}
            or ".dist-info/" in name
        )
        assert "__pycache__" not in name


def test_the_command_runs_from_any_folder(installed, tmp_path):
    code = "import environments.apps.cli.main as m; print(m.__file__); m.main(['doctor', '--json'])"
    done = run_from_elsewhere(installed, tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))


def test_every_config_is_found_from_any_folder(installed, tmp_path):
    code = "from environments.config.yaml_file import config_names; print('\\n'.join(config_names()))"
    done = run_from_elsewhere(installed, tmp_path, code)
    shipped = sorted(
        str(Path(n).relative_to("configs").with_suffix("")) for n in tracked("configs") if n.endswith(".yaml")
    )
    assert done.stdout.split() == shipped
