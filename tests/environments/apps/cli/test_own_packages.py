"""A user's own package of one of our names: in the working directory it changes nothing, on PYTHONPATH it is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import environments
from agent_loop import HermesAgentLoop
from agent_loop.local_models.cpu_model import CpuModel
from agent_loop.records.record import RolloutRecord
from environments.apps.bench.bench_loop import bench_server
from environments.apps.learn.plan import REFERENCE_TRAINER
from support.own_packages import PACKAGES, write_own_packages
from support.tokens_cpu import require_cpu_model

README = Path(environments.__file__).parents[1] / "README.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project with its own packages of our names, and the README's environment."""
    write_own_packages(tmp_path)
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "lines.py").write_text(example[1])
    (tmp_path / "lines.yaml").write_text("environment: lines:LinesEnv\nopenai: {server_type: standin}\n")
    return tmp_path


def hermes_rl(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The installed command, run in the folder."""
    command = [str(Path(sys.executable).with_name("hermes-rl")), *words]
    environ = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), **more}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)


def test_the_command_runs_a_users_environment_in_a_folder_with_packages_of_our_names(folder: Path) -> None:
    sizes = ["--env.total_steps", "1", "--env.group_size", "2"]
    done = hermes_rl(folder, "process", "lines.yaml", *sizes, "--out", "run")
    assert done.returncode == 0, done.stderr[-3000:]
    records = [RolloutRecord.from_json(line) for line in (folder / "run/rollouts.jsonl").read_bytes().splitlines()]
    assert len(records) == 2
    assert all(record.turns for record in records)


def test_a_run_api_and_a_trainer_are_started_there(folder: Path) -> None:
    done = hermes_rl(folder, "bench", "serve", "--groups", "1", "--sequences", "2", "--tokens", "50")
    assert done.returncode == 0, done.stderr[-3000:]


async def test_a_stand_in_is_started_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    async with bench_server("stand-in", 0.0) as server:
        result = await HermesAgentLoop(server, max_turns=1).run([{"role": "user", "content": "hello"}])
    assert result.has_tokens, result.error


async def test_llama_cpp_is_started_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_cpu_model()
    from support.tiny_llama import write_tiny_llama

    model = write_tiny_llama(folder / "tiny.gguf")
    monkeypatch.chdir(folder)
    async with CpuModel(model=model, parallel=1, threads=1, context_tokens=64) as server:
        assert server.url


def test_the_reference_trainer_is_started_there(folder: Path) -> None:
    done = subprocess.run(REFERENCE_TRAINER, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: ")


@pytest.mark.parametrize("name", PACKAGES[1:])
def test_a_package_on_pythonpath_is_named_in_one_sentence(folder: Path, tmp_path_factory, name: str) -> None:
    path = tmp_path_factory.mktemp("path")
    (folder / name).rename(path / name)
    done = hermes_rl(folder, "doctor", PYTHONPATH=str(path))
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert f"the package {name} of hermes-rl is expected" in sentence
    assert str(path / name) in sentence
