"""YAMLs of hermes-agent load: each key that is called otherwise, or that nothing needs, is mapped with one line."""

import logging

import pytest

from environments.config.loader import load_config
from environments.config.settings import RunConfig
from environments.errors import ConfigError
from sandbox_pool.providers.base import BUILT_IN

YAML = """
env:
  enabled_toolsets: [terminal, file]
  max_agent_turns: 60
  max_token_length: 32000
  agent_temperature: 0.8
  terminal_backend: {backend}
  terminal_timeout: 300
  tool_pool_size: 128
  dataset_name: null
  dataset_split: train
  prompt_field: question
  preview_size_chars: 900
  tool_result_overrides: {{terminal: 5000, read_file: null}}
  system_prompt: You are helpful.
  use_wandb: false
  wandb_name: x
openai:
  base_url: http://127.0.0.1:9001/v1
  model_name: m
  server_type: openai
  health_check: false
  timeout: 77
"""


@pytest.fixture
def load(tmp_path):
    def loaded(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return load_config(RunConfig, path)

    return loaded


@pytest.mark.parametrize(
    ("backend", "named"),
    [("local", "local"), ("modal", "modal"), ("docker", "docker"), ("ssh", "ssh"), ("singularity", "apptainer")],
)
def test_a_yaml_of_hermes_agent_loads_and_says_what_became_of_its_keys(load, caplog, backend, named):
    provider = named if named in BUILT_IN else "local"
    with caplog.at_level(logging.WARNING):
        config = load(YAML.format(backend=backend))
    assert config.env.pool.provider == provider
    assert config.servers()[0].timeout_s == 77
    assert (config.env.preview_size_chars, config.env.tool_result_overrides) == (
        900,
        {"terminal": 5000, "read_file": None},
    )
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4
    assert any(f"env.terminal_backend: {backend!r} -> env.pool.provider: {provider!r}" in line for line in said)
    assert any("openai.health_check: False -> nothing: every server is asked" in line for line in said)
    assert all("run.yaml:" in line for line in said)


def test_a_provider_that_is_given_wins_over_the_backend(load, caplog):
    config = load("env:\n  terminal_backend: modal\n  pool: {provider: local}\n")
    assert config.env.pool.provider == "local"
    assert "ignored: env.pool.provider is 'local'" in caplog.text


def test_servers_in_a_list_are_read_too(load):
    config = load("openai:\n- {base_url: 'http://a', health_check: true}\n- {base_url: 'http://b', timeout: 5}\n")
    assert [server.timeout_s for server in config.servers()] == [1200, 5]


@pytest.mark.parametrize("text", ["env: {terminal_backends: local}", "openai: {health_checks: 1}", "health_check: 1"])
def test_any_other_key_is_still_refused(load, text):
    with pytest.raises(ConfigError, match="unknown key"):
        load(text)


def test_distributions_of_your_own_are_read(load):
    config = load("env:\n  distribution: mine\n  distributions: {mine: {terminal: 1.0, todo: 0.5}}\n")
    assert config.env.distributions == {"mine": {"terminal": 1.0, "todo": 0.5}}
