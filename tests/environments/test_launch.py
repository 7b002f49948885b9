"""From a config, or a class, to an environment; bad input is one sentence and exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from environments.apps.cli.main import main
from environments.apps.learn.plan import LearnRunConfig
from environments.config.settings import HermesAgentEnvConfig, ServerConfig
from environments.config.yaml_file import config_names, find_config
from environments.errors import ConfigError
from environments.launch import command_line, find_environment, load_environment, load_run
from environments.terminal_tasks.terminal_env import TerminalTasksEnv


def environment_configs() -> list[str]:
    return [name for name in config_names() if "environment" in yaml.safe_load(find_config(name).read_text())]


@pytest.mark.parametrize("name", environment_configs())
def test_every_shipped_config_builds_its_environment(name: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Say hello."}\n')
    rows, tasks = str(tmp_path / "rows.jsonl"), str(Path(__file__).parents[2] / "examples" / "harbor_tasks")
    needed = {"prompts": ["--env.dataset", rows], "harbor": ["--env.tasks", tasks]}.get(name, [])
    named = yaml.safe_load(find_config(name).read_text())["environment"]
    try:
        env = load_environment(name, needed)
    except ConfigError as error:
        if "needs the package" not in str(error):
            raise
        pytest.skip(str(error))
    assert isinstance(env, find_environment(named))
    assert env.server_configs


def test_each_environment_ships_for_every_kind_of_server() -> None:
    for name in ("terminal_tasks", "code_tasks"):
        assert {name, f"{name}_vllm", f"{name}_llamacpp", f"{name}_openai"} <= set(environment_configs())


def test_flags_win_over_the_file() -> None:
    env = load_environment(
        "terminal_tasks", ["--env.group_size", "16", "--openai.model_name=x", "--env.worker_timeout", "-1"]
    )
    assert (env.config.group_size, env.server_configs[0].model_name, env.config.worker_timeout) == (16, "x", -1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("environment: terminal_task", "unknown environment 'terminal_task'.*'terminal_tasks'"),
        ("env: {group_size: 4}", "`environment` is missing"),
        ("environment: terminal_tasks\nenv:\n  group_sise: 4", r"bad.yaml:3: unknown key 'group_sise'.*'group_size'"),
        ("environment: terminal_tasks\nenv:\n  levles: [0]", "did you mean 'levels'"),
        ("environment: terminal_tasks\nopenai:\n  api_kee: x", "did you mean 'api_key'"),
        (
            "environment: terminal_tasks\nenv:\n  limits: {max_tool_cals: 1}",
            "yaml:3:.*did you mean 'max_tool_calls'",
        ),
        ("environment: terminal_tasks\nenv:\n  limits: {tool_timeout_s: 0}", "bad.yaml:3: env.limits.tool_timeout_s"),
        ("environment: terminal_tasks\nlern: {}", "did you mean 'learn'"),
        ("environment: nowhere:Env", "no module 'nowhere'"),
        ("environment: json:JSONDecoder", "no HermesAgentBaseEnv called 'JSONDecoder'"),
    ],
)
def test_what_is_wrong_with_a_config_is_said_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_environment(path)


def test_the_sections_of_learn_are_checked_by_learn_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("environment: terminal_tasks\ntrainer:\n  learning_rat: 1\n")
    assert load_environment(path).name == "terminal_tasks"
    with pytest.raises(ConfigError, match=r"c.yaml:3: unknown key 'learning_rat' in 'trainer'.*'learning_rate'"):
        load_run(path, [], None, LearnRunConfig)


@pytest.mark.parametrize("verb", ["serve", "process", "evaluate"])
def test_a_config_that_is_not_there_exits_2(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, "nope.yaml"]) == 2
    assert "nope.yaml" in capsys.readouterr().err


def test_the_defaults_of_config_init_lie_below_yaml_and_flags(tmp_path: Path) -> None:
    class WithDefaults(TerminalTasksEnv):
        @classmethod
        def config_init(cls) -> tuple[HermesAgentEnvConfig, list[ServerConfig]]:
            return cls.env_config_cls(group_size=2, max_agent_turns=3), [
                ServerConfig(base_url="http://x", model_name="m")
            ]

    path = tmp_path / "c.yaml"
    path.write_text("env: {max_agent_turns: 5}")
    env = load_environment(path, ["--env.seed", "9"], WithDefaults)
    assert (env.config.group_size, env.config.max_agent_turns, env.config.seed) == (2, 5, 9)
    assert env.server_configs[0].base_url == "http://x"


def test_python_m_takes_the_same_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    called: dict[str, Any] = {}

    def run_verb(env: Any, verb: str, out: Path | None, fresh: bool, workers: int) -> int:
        called.update(group_size=env.config.group_size, verb=verb, out=out, fresh=fresh)
        return 0

    monkeypatch.setattr("environments.launch.run_verb", run_verb)
    words = ["process", "--config", "terminal_tasks", "--env.group_size", "2", "--out", "here", "--fresh"]
    assert command_line(TerminalTasksEnv, words) == 0
    assert called == {"group_size": 2, "verb": "process", "out": Path("here"), "fresh": True}
    assert command_line(TerminalTasksEnv, ["process", "--env.group_sise", "2"]) == 2
    assert "group_size" in capsys.readouterr().err


def test_a_users_own_module_is_found_beside_its_config(tmp_path: Path) -> None:
    (tmp_path / "beside_me.py").write_text(
        "from environments.terminal_tasks.terminal_env import TerminalTasksEnv\n\n\n"
        "class Mine(TerminalTasksEnv):\n    name = 'mine'\n"
    )
    (tmp_path / "mine.yaml").write_text("environment: beside_me:Mine")
    assert load_environment(tmp_path / "mine.yaml").name == "mine"
