"""`hermes_rl` is the public API: cheap to import, typed for whoever installs the wheel, clear about a name clash."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from venv import EnvBuilder

import pytest

import hermes_rl

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("hermes_rl", "environments", "agent_loop", "tool_parsers", "sandbox_pool")


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel in it, unpacked as pip does; our dependencies are those of this one."""
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = out.glob("*.whl")
    EnvBuilder().create(out / "venv")
    (site,) = (out / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    # Folders named in a .pth are not searched for others: the editable install of this checkout stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return out / "venv"


@pytest.fixture(scope="module")
def site(venv: Path) -> Path:
    (found,) = venv.glob("lib/python*/site-packages")
    return found


def python(folder: Path, *words: str, program: Path | str = sys.executable) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    command = [str(program), *words]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=280, check=False)


def readme_example() -> str:
    found = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert found is not None
    return found[1]


def test_every_public_name_is_there() -> None:
    assert sorted(hermes_rl.__all__) == hermes_rl.__all__ == dir(hermes_rl)
    for name in hermes_rl.__all__:
        assert getattr(hermes_rl, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        hermes_rl.Nothing  # noqa: B018


def test_importing_it_imports_nothing_else(tmp_path: Path) -> None:
    code = "import sys; before = set(sys.modules); import hermes_rl; print(*sorted(set(sys.modules) - before))"
    assert python(tmp_path, "-c", code).stdout.split() == ["__future__", "hermes_rl"]


def test_the_version_is_that_of_the_wheel(site: Path) -> None:
    (metadata,) = site.glob("hermes_rl-*.dist-info/METADATA")
    assert f"\nVersion: {hermes_rl.__version__}\n" in metadata.read_text()


@pytest.mark.ci
def test_user_programs_pass_mypy_strict_against_the_wheel(venv: Path, site: Path, tmp_path: Path) -> None:
    assert all((site / package / "py.typed").is_file() for package in PACKAGES)
    (tmp_path / "three.py").write_text(
        "from hermes_rl import Outcome, SandboxSpec, SlotPool, PoolConfig, get_parser\n"
        'reveal_type(SlotPool.from_config(PoolConfig(spec=SandboxSpec(network="none"))))\n'
        'reveal_type(get_parser("hermes"))\n'
    )
    (tmp_path / "lines.py").write_text(readme_example())
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    options = ["--strict", "--config-file", os.devnull, "--python-executable", str(venv / "bin" / "python")]
    programs = ["three.py", "lines.py", *map(str, sorted((tmp_path / "examples").glob("*.py")))]
    done = python(tmp_path, "-m", "mypy", *options, "--cache-dir", str(ROOT / ".mypy_cache" / "door"), *programs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert 'Revealed type is "sandbox_pool.pool.pool.SlotPool"' in done.stdout
    assert 'Revealed type is "tool_parsers.engine.Parser"' in done.stdout


@pytest.mark.parametrize("package", PACKAGES[1:])
def test_a_package_of_the_same_name_is_named_in_one_sentence(package: str, tmp_path: Path) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    done = python(tmp_path, "-c", "from hermes_rl import HermesAgentBaseEnv")
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert f"needs its own package {package!r} at {ROOT / package}, but Python finds {tmp_path / package}: " in last
    assert "-P" in last


@pytest.mark.ci
def test_the_example_runs_beside_a_package_of_the_same_name(venv: Path, tmp_path: Path) -> None:
    """From the wheel, with -P as the sentence says."""
    (tmp_path / "environments").mkdir()
    (tmp_path / "environments" / "__init__.py").write_text("raise AssertionError('the wrong one')\n")
    (tmp_path / "lines.py").write_text(readme_example())
    words = ["process", "--env.total_steps", "1", "--env.group_size", "2", "--out", "run"]
    done = python(tmp_path, "-P", "lines.py", *words, program=venv / "bin" / "python")
    assert done.returncode == 0, done.stderr[-3000:]
    assert len((tmp_path / "run" / "rollouts.jsonl").read_bytes().splitlines()) == 2
