import pytest
from pydantic import ValidationError

from sandbox_pool.config import PoolConfig, default_state_dir


def test_unknown_keys_are_refused():
    with pytest.raises(ValidationError, match="slots_per_hosts"):
        PoolConfig(slots_per_hosts=3)


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError):
        PoolConfig().max_hosts = 3


def test_more_hosts_at_least_than_at_most_is_refused():
    with pytest.raises(ValidationError, match="min_hosts"):
        PoolConfig(min_hosts=5, max_hosts=2)


def test_an_isolation_level_that_does_not_exist_is_refused():
    with pytest.raises(ValidationError, match="min_isolation"):
        PoolConfig(min_isolation="strong")


def test_the_state_directory_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_state_dir() == tmp_path / "hermes-rl"
    assert PoolConfig(state_dir=tmp_path / "own").resolved_state_dir() == tmp_path / "own"
