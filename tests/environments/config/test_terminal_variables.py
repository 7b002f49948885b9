"""hermes-agent's TERMINAL_* variables in a run's config: below flags and file, above the defaults."""

import logging

import pytest

from environments.apps.cli.main import main
from environments.config.loader import load_config
from environments.config.settings import RunConfig
from environments.errors import ConfigError
from environments.launch import load_run

ENVIRON = {
    "TERMINAL_ENV": "nomad",
    "TERMINAL_NOMAD_ADDRESS": "http://10.0.0.1:4646",
    "TERMINAL_NOMAD_TOKEN": "very-private",
    "TERMINAL_NOMAD_IMAGE": "tasks:1",
    "TERMINAL_TIMEOUT": "45",
}


def test_variables_set_what_nothing_else_does_and_one_line_says_so(caplog):
    with caplog.at_level(logging.INFO):
        env = load_config(RunConfig, None, (), ENVIRON).env
    assert (env.pool.provider, env.terminal_timeout) == ("nomad", 45)
    assert env.pool.provider_options["address"] == "http://10.0.0.1:4646"
    assert env.pool_config().spec == env.sandbox
    assert (env.pool.provider_options["image"], env.sandbox.network) == ("tasks:1", "host")
    (line,) = caplog.messages
    assert "TERMINAL_ENV -> env.pool.provider: nomad; " in line
    assert "TERMINAL_TIMEOUT -> env.terminal_timeout: 45.0" in line
    assert "very-private" not in line


def test_file_and_flags_win(tmp_path, caplog):
    path = tmp_path / "run.yaml"
    path.write_text("env:\n  terminal_timeout: 7\n  pool:\n    provider: local\n")
    flags = ["--env.sandbox.network", "none"]
    env = load_config(RunConfig, path, flags, {**ENVIRON, "TERMINAL_LIFETIME_SECONDS": "9"}).env
    assert (env.pool.provider, env.pool.provider_options, env.pool.idle_s) == ("local", {}, 9)
    assert (env.terminal_timeout, env.sandbox.image, env.sandbox.network) == (7, None, "none")
    assert f"TERMINAL_ENV=nomad does not choose the provider: {path}:4 says env.pool.provider: local" in caplog.text


def test_options_of_the_provider_in_the_file_are_taken_without_terminal_env(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("env: {pool: {provider: nomad}}\n")
    env = load_config(RunConfig, path, (), {"TERMINAL_NOMAD_ADDRESS": "http://10.0.0.1:4646"}).env
    assert env.pool.provider_options == {"address": "http://10.0.0.1:4646"}
    assert env.sandbox.network == "none"


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"TERMINAL_ENV": "vercel"}, "TERMINAL_ENV='vercel' is not a backend"),
        ({"TERMINAL_TIMEOUT": "soon"}, "TERMINAL_TIMEOUT: 'soon' is not a number"),
        ({"TERMINAL_TIMEOUT": "0"}, "TERMINAL_TIMEOUT: env.terminal_timeout: input should be greater than 0"),
    ],
)
def test_a_wrong_value_is_one_sentence_about_its_variable(environ, sentence):
    with pytest.raises(ConfigError, match="^" + sentence):
        load_config(RunConfig, None, (), environ)


def test_verbs_read_them(monkeypatch, capsys):
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    _, config = load_run("terminal_tasks", [], None, RunConfig)
    assert config.env.pool.provider == "nomad"
    assert main(["config", "terminal_tasks", "--set"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("env.pool.provider ") and line.endswith('"nomad"  (TERMINAL_ENV)') for line in lines)
    assert main(["pool", "job", "--provider", "nomad"]) == 0
    said = capsys.readouterr()
    assert '"image": "tasks:1"' in said.out
    assert "TERMINAL_NOMAD_IMAGE" in said.err


def test_pool_verbs_take_the_provider_of_the_environment(monkeypatch, capsys):
    monkeypatch.setenv("TERMINAL_ENV", "modal")
    monkeypatch.setenv("TERMINAL_MODAL_MAX_LIFETIME", "5")
    assert main(["pool", "check"]) == 2
    assert "timeout_s" in capsys.readouterr().err
