from pathlib import Path

import pytest

from sandbox_pool.config import PoolConfig


def test_an_empty_environment_gives_the_local_provider():
    assert PoolConfig.from_env({}).provider == "local"


def test_the_variables_of_the_earlier_system_are_understood():
    config = PoolConfig.from_env(
        {
            "TERMINAL_ENV": "local",
            "TERMINAL_TIMEOUT": "60",
            "TERMINAL_LIFETIME_SECONDS": "300",
            "TERMINAL_CWD": "/srv/task",
            "TERMINAL_SCRATCH_DIR": "/fast",
            "TERMINAL_CONTAINER_CPU": "2",
            "TERMINAL_CONTAINER_MEMORY": "5120",
            "TERMINAL_CONTAINER_DISK": "51200",
        }
    )
    assert (config.exec_timeout_s, config.idle_s, config.scratch_dir) == (60.0, 300.0, Path("/fast"))
    spec = config.spec
    assert (spec.workdir, spec.cpu, spec.memory_mb, spec.disk_mb) == ("/srv/task", 2.0, 5120, 51200)


def test_commands_keep_the_network_that_earlier_scripts_rely_on():
    assert PoolConfig.from_env({}).spec.network == "host"


def test_nomad_variables_become_sizes_image_and_provider_options():
    config = PoolConfig.from_env(
        {
            "TERMINAL_ENV": "nomad",
            "TERMINAL_NOMAD_ADDRESS": "http://127.0.0.1:4646",
            "TERMINAL_NOMAD_DRIVER": "docker",
            "TERMINAL_NOMAD_IMAGE": "tasks:1",
            "TERMINAL_NOMAD_SLOTS": "10",
            "TERMINAL_NOMAD_MIN": "1",
            "TERMINAL_NOMAD_MAX": "5",
        }
    )
    assert (config.provider, config.slots_per_host, config.min_hosts, config.max_hosts) == ("nomad", 10, 1, 5)
    assert config.spec.image == "tasks:1"
    assert config.provider_options == {"address": "http://127.0.0.1:4646", "driver": "docker"}


def test_modal_image_is_used_for_modal_only():
    variables = {"TERMINAL_MODAL_IMAGE": "python:3.11", "TERMINAL_DOCKER_IMAGE": "debian"}
    assert PoolConfig.from_env({**variables, "TERMINAL_ENV": "modal"}).spec.image == "python:3.11"
    assert PoolConfig.from_env({**variables, "TERMINAL_ENV": "docker"}).spec.image == "debian"
    assert PoolConfig.from_env(variables).spec.image is None


def test_a_minimum_above_the_default_maximum_raises_the_maximum():
    config = PoolConfig.from_env({"TERMINAL_ENV": "modal", "TERMINAL_MODAL_MIN": "9"})
    assert (config.min_hosts, config.max_hosts) == (9, 9)


def test_slot_pool_is_the_backend_it_names():
    assert PoolConfig.from_env({"TERMINAL_ENV": "slot_pool", "TERMINAL_SLOT_BACKEND": "nomad"}).provider == "nomad"


def test_a_backend_that_does_not_exist_is_refused_with_what_there_is():
    with pytest.raises(ValueError, match=r"'vercel'.*local, docker"):
        PoolConfig.from_env({"TERMINAL_ENV": "vercel"})


def test_a_number_that_is_none_names_its_variable():
    with pytest.raises(ValueError, match="TERMINAL_TIMEOUT='soon'"):
        PoolConfig.from_env({"TERMINAL_TIMEOUT": "soon"})


def test_a_misspelt_variable_is_pointed_out(caplog):
    PoolConfig.from_env({"TERMINAL_TIMEOUTS": "3"})
    assert "did you mean 'TERMINAL_TIMEOUT'?" in caplog.text


def test_retired_variables_pass_in_silence(caplog):
    PoolConfig.from_env({"TERMINAL_CONTAINER_PERSISTENT": "true", "TERMINAL_PERSISTENT_SHELL": "1"})
    assert caplog.text == ""


def test_a_relative_working_directory_of_the_host_is_not_taken_into_the_slot(caplog):
    assert PoolConfig.from_env({"TERMINAL_CWD": "."}).spec.workdir is None
    assert "TERMINAL_CWD" in caplog.text
