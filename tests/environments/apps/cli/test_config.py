"""`hermes-rl config`: each setting in force, where it comes from, and no secret."""

import json

import pytest
import yaml

from environments.apps.cli.main import main

CONFIG = """\
environment: terminal_tasks
env:
  group_size: 8
  pool:
    slots_per_host: 3
  rewards:
    recipe: format_penalty
openai:
  server_type: vllm
  base_url: http://user:hush@127.0.0.1:1
"""


@pytest.fixture
def shown(tmp_path, monkeypatch, capsys):
    def show(*words):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "my.yaml").write_text(CONFIG)
        assert main(["config", "my.yaml", *words]) == 0
        return capsys.readouterr().out

    return show


def test_each_setting_says_where_it_comes_from(shown):
    settings = json.loads(shown("--json", "--env.seed", "7", "--openai.api_key", "sesame"))
    assert settings["env.group_size"] == {"value": 8, "from": "my.yaml:3"}
    assert settings["env.pool.slots_per_host"] == {"value": 3, "from": "my.yaml:5"}
    assert settings["env.pool.max_hosts"]["from"] == "default"
    assert settings["env.rewards.recipe"]["from"] == "my.yaml:7"
    assert settings["env.rewards.verifier_weight"]["from"] == "default"
    assert settings["env.seed"] == {"value": 7, "from": "flag --env.seed"}
    assert settings["openai.api_key"] == {"value": "***", "from": "flag --openai.api_key"}


def test_no_secret_is_shown_and_defaults_can_be_left_out(shown):
    lines = shown("--set", "--openai.api_key", "sesame").splitlines()
    assert not any("sesame" in line or "hush" in line or "(default)" in line for line in lines)
    assert lines[1].split() == ["env.group_size", "8", "(my.yaml:3)"]


@pytest.mark.parametrize("name", ["terminal_tasks", "code_tasks", "learn/smollm2"])
def test_what_is_shown_can_be_written_into_a_config(name, tmp_path, capsys):
    assert main(["config", name, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    whole: dict = {}
    for path, setting in shown.items():
        *sections, last = path.split(".")
        at = whole
        for section in sections:
            at = at.setdefault(section, {})
        if setting["value"] != "***":
            at[last] = setting["value"]
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(whole))
    assert main(["config", str(tmp_path / "again.yaml"), "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert {path: setting["value"] for path, setting in again.items()} == {
        path: setting["value"] for path, setting in shown.items()
    }
