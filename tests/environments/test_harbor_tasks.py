"""Task folders in Harbor's format: read as Harbor reads them, scored by their own verifiers, and not forged."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent_loop.local_models.standin.policies import call
from environments.errors import ConfigError
from environments.harbor_tasks import HarborEnv, HarborTask, resolved, rewards_in, without_canary
from environments.launch import load_environment
from sandbox_pool import SlotPool
from sandbox_pool.config import PoolConfig
from sandbox_pool.spec import NetworkRules, SandboxSpec
from support.env_tasks import standin_model

TASKS = Path(__file__).parents[2] / "examples" / "harbor_tasks"
FORGERY = (
    "echo 1 > /logs/verifier/reward.txt; mkdir -p /tests; printf 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh;"
    "chmod +x /tests/test.sh; echo '{\"reward\": 1}' > /logs/verifier/reward.json;"
    "(setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' > /dev/null 2>&1 &)"
)


def harbor(path: Path, *flags: str) -> HarborEnv:
    env = load_environment(f"harbor:{path}", ["--env.image", "host", *flags])
    assert isinstance(env, HarborEnv)
    return env


def copied(folder: Path, name: str = "count-lines", **changes: str) -> Path:
    """A shipped task with some texts of its task.toml replaced."""
    task = folder / name
    shutil.copytree(TASKS / name, task)
    text = (task / "task.toml").read_text()
    for section, lines in changes.items():
        text = text.replace(f"[{section}]\n", f"[{section}]\n{lines}\n")
    (task / "task.toml").write_text(text)
    return task


def agent(steps: Callable[[str], str]) -> Callable[[Any], str]:
    """A policy that runs one command and is done."""
    return lambda request: "Done." if request.results else call("terminal", {"command": steps(request.task)})


async def test_rewards_are_those_of_the_verifier_and_cannot_be_forged(tmp_path: Path) -> None:
    """Oracle, nop, a half-right agent and a forger on one pool of real slots."""
    folder = tmp_path / "tasks"
    for name in ("count-lines", "merge-json", "write-config"):
        copied(folder, name)
    env = harbor(folder)
    solutions = {env.format_prompt(item).strip(): str(env.solution(item)[0]) for item in env.items}
    players: dict[str, tuple[Any, list[float]]] = {
        "oracle": (agent(lambda task: solutions[task.strip()]), [1.0, 1.0, 1.0]),
        "nop": (lambda request: "Done.", [0.0, 0.0, 0.0]),
        "half": (agent(lambda _: "wc -l < data.txt > count.txt; cp base.json merged.json; true"), [0.5, 1 / 3, 0.0]),
        "forger": (agent(lambda _: FORGERY), [0.0, 0.0, 0.0]),
    }
    found = {}
    async with SlotPool.from_config(PoolConfig(provider="local", slots_per_host=4, state_dir=tmp_path / "s")) as pool:
        for name, (policy, _) in players.items():
            async with standin_model(policy) as (model, _log):
                env.pool, env.model = pool, model
                groups = [await env.rollouts.run_group(item, n, 1) for n, item in enumerate(env.items)]
            found[name] = [group.scored[0].record.verifier_score for group in groups]
            if name == "half":
                parts = groups[1].scored[0].record.reward_components
                assert {key: parts[f"verifier/{key}"] for key in ("name", "log", "ports")} == {
                    "name": 1,
                    "log": 0,
                    "ports": 0,
                }
    assert found == {name: pytest.approx(wanted) for name, (_, wanted) in players.items()}


@pytest.mark.parametrize(
    ("name", "data", "rewards"),
    [
        ("reward.txt", b" 0.5\n", {"reward": 0.5}),
        ("reward.json", b"1", {"reward": 1.0}),
        ("reward.json", b'{"a": 1, "b": 0.25}', {"a": 1.0, "b": 0.25}),
        ("reward.txt", b"", None),
        ("reward.txt", b"yes", None),
        ("reward.txt", b"nan", None),
        ("reward.json", b"1e999", None),
        ("reward.json", b'{"a": "1"}', None),
        ("reward.json", b"{}", None),
        ("reward.json", b"[1]", None),
        ("reward.json", b"[" * 100_000, None),
        ("reward.json", b"1" + b"0" * 400, None),
    ],
)
def test_a_reward_is_finite_numbers_or_an_error(name: str, data: bytes, rewards: dict[str, float] | None) -> None:
    if rewards is None:
        with pytest.raises(ValueError, match="the verifier's"):
            rewards_in(name, data)
    else:
        assert rewards_in(name, data) == rewards


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metadata": "[[steps]]\nname = 'one'\n[metadata.more]"}, "several steps"),
        ({"environment": "gpus = 1"}, "GPUs"),
        ({"environment": "os = 'Windows'"}, "not linux"),
        ({"environment": "mcp_servers = [{name = 'x'}]"}, "mcp_servers"),
        ({"verifier": "environment_mode = 'separate'"}, "an environment of its own"),
        ({"verifier": "collect = [{command = 'x'}]"}, "collect"),
        ({"agent": "user = 'bob'", "verifier": "user = 'root'"}, "verifier.user"),
        ({"environment": "cpus = -1"}, "task.toml: environment.cpus"),
        ({"agent": "timeout_sec ="}, "Invalid value"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HarborTask.read(copied(tmp_path, **changes))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("environment/docker-compose.yaml", "several containers"),
        ("trajectory.json", "trajectory.json"),
        ("tests/.harborignore", ".harborignore"),
    ],
)
def test_files_that_mean_more_are_refused(tmp_path: Path, path: str, message: str) -> None:
    task = copied(tmp_path)
    (task / path).write_text("x")
    with pytest.raises(ConfigError, match=message):
        HarborTask.read(task)


def test_the_task_says_what_its_slot_is(tmp_path: Path) -> None:
    place = "cpus = 2\nstorage = '1G'\nenv = {A = '${HOME:-x}/y'}"
    task = HarborTask.read(
        copied(tmp_path, environment=place, verifier='network_mode = "public"', agent='user = "bob"')
    )
    spec = task.spec(SandboxSpec(), None)
    assert (spec.image, spec.user, spec.workdir) == ("python:3.12-slim", "bob", "/app")
    assert (spec.cpu, spec.memory_mb, spec.disk_mb) == (2, 512, 1024)
    assert spec.network == NetworkRules(allow=())
    assert task.hosts(task.file.verifier) == ("*:*",)
    assert task.spec(SandboxSpec(), "host").image is None
    (task.folder / "environment" / "Dockerfile").write_text("FROM scratch\n")
    assert task.spec(SandboxSpec(), "x:1").image == "x:1"
    with pytest.raises(ConfigError, match="Dockerfile"):
        task.spec(SandboxSpec(), "host")


def test_a_dockerfile_is_built_when_no_image_is_named(tmp_path: Path) -> None:
    task = copied(tmp_path)
    (task / "task.toml").write_text("")
    with pytest.raises(ConfigError, match="neither"):
        HarborTask.read(task).spec(SandboxSpec(), None)
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    assert HarborTask.read(task).spec(SandboxSpec(), None).image == f"dockerfile:{task}/environment"


def test_the_time_of_the_task_is_the_deadline_of_its_rollouts() -> None:
    env = harbor(TASKS / "count-lines")
    assert env.limits(env.items[0]).rollout_timeout_s == 120


def test_variables_come_from_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HERE", "h")
    assert resolved({"A": "${HERE}", "B": "x${NOT_HERE:-d}"}, tmp_path) == {"A": "h", "B": "xd"}
    with pytest.raises(ConfigError, match="NOT_HERE is not set"):
        resolved({"A": "${NOT_HERE}"}, tmp_path)


def test_marks_against_training_are_not_shown() -> None:
    assert without_canary("<!-- some canary GUID 1 -->\n\n# Task\n") == "# Task\n"


@pytest.mark.parametrize(
    "act",
    [
        "rm -f $(command -v chmod)",
        "ln -sf $(command -v true) $(command -v bash)",
        "echo exit > /etc/profile; rm -rf /usr/bin/*",
    ],
)
async def test_an_agent_that_breaks_the_system_of_the_verifier_fails(tmp_path: Path, act: str) -> None:
    """A fault of the reward code would make its rollout untrainable; a broken task is one all the same."""
    async with SlotPool.from_config(PoolConfig(provider="local", slots_per_host=2, state_dir=tmp_path / "s")) as pool:
        for broken, found in ((False, ("agent_fault", 0.0)), (True, ("reward_error", None))):
            env = harbor(copied(tmp_path / str(broken)), "--env.rollout_tries", "1")
            if broken:
                (tmp_path / str(broken) / "count-lines" / "tests" / "test.sh").write_text("#!/bin/sh\nexit 3\n")
            async with standin_model(agent(lambda _: "true" if broken else act)) as (model, _log):
                env.pool, env.model = pool, model
                [record] = (await env.rollouts.run_group(env.items[0], 0, 1)).records()
            assert (record.outcome, record.score) == found, record.error
