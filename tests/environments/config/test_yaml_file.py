"""Configs are found by path or by name."""

import pytest

from environments.config.yaml_file import config_names, find_config
from environments.errors import ConfigError


def test_a_path_is_taken_as_it_is(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("{}")
    assert find_config(path) == path


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        find_config(tmp_path)


def test_every_shipped_name_is_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in config_names():
        assert find_config(name).is_file()
        assert find_config(f"{name}.yaml").is_file()
