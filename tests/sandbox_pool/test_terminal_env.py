from pathlib import Path

import pytest

from sandbox_pool.config import PoolConfig
from sandbox_pool.providers.base import BUILT_IN, ProviderContext, load_provider


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


def test_elsewhere_commands_have_the_network_that_hermes_agents_tasks_have():
    assert PoolConfig.from_env({"TERMINAL_ENV": "local"}).spec.network == "none"
    assert PoolConfig.from_env({"TERMINAL_ENV": "modal"}).spec.network == "host"
    assert PoolConfig.from_env({"TERMINAL_TIMEOUT": "60"}).spec.network == "none"


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
    assert config.spec.image is None
    assert config.provider_options == {"address": "http://127.0.0.1:4646", "driver": "docker", "image": "tasks:1"}


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
    with pytest.raises(ValueError, match="TERMINAL_TIMEOUT: 'soon' is not a number"):
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


BLOCKS = pytest.mark.parametrize(
    ("block", "provider", "options", "spec"),
    [
        pytest.param(
            """
            TERMINAL_ENV=singularity
            TERMINAL_DOCKER_IMAGE=python:3.11-slim
            TERMINAL_SINGULARITY_IMAGE=docker://python:3.11-slim
            TERMINAL_TIMEOUT=60
            """,
            "apptainer",
            {"image": "docker://python:3.11-slim"},
            {},
            id="singularity",
        ),
        pytest.param(
            """
            TERMINAL_ENV=docker
            TERMINAL_DOCKER_IMAGE=nikolaik/python-nodejs:python3.11-nodejs20
            TERMINAL_MODAL_IMAGE=python:3.11
            TERMINAL_DOCKER_ENV={"LANG": "C"}
            TERMINAL_CWD=/workspace
            TERMINAL_TIMEOUT=60
            """,
            "docker",
            {"cap_add": ["SYS_ADMIN"]},
            {"image": "nikolaik/python-nodejs:python3.11-nodejs20", "workdir": "/workspace", "env": {"LANG": "C"}},
            id="docker",
        ),
        pytest.param(
            """
            TERMINAL_ENV=ssh
            TERMINAL_SSH_HOST=192.168.1.100
            TERMINAL_SSH_USER=agent
            TERMINAL_SSH_PORT=22
            TERMINAL_SSH_KEY=/keys/id_rsa
            TERMINAL_SSH_TIMEOUT=10
            TERMINAL_TIMEOUT=60
            """,
            "ssh",
            {
                "machines": ["ssh://agent@192.168.1.100:22"],
                "check_host_keys": "accept-new",
                "identity_file": Path("/keys/id_rsa"),
                "connect_timeout_s": 10,
            },
            {},
            id="ssh",
        ),
        pytest.param(
            """
            TERMINAL_ENV=modal
            TERMINAL_MODAL_IMAGE=python:3.11
            TERMINAL_MODAL_APP_NAME=hermes-sandbox
            TERMINAL_MODAL_IDLE_TIMEOUT=120
            TERMINAL_MODAL_MAX_LIFETIME=3600
            TERMINAL_MODAL_EXEC_TIMEOUT=30
            TERMINAL_MODAL_WORKSPACE=/data
            TERMINAL_TIMEOUT=60
            """,
            "modal",
            {"app": "hermes-sandbox", "idle_timeout_s": 120, "timeout_s": 3600, "drain_s": 900},
            {"image": "python:3.11"},
            id="modal",
        ),
        pytest.param(
            """
            TERMINAL_ENV=nomad
            TERMINAL_NOMAD_ADDRESS=http://localhost:4646
            TERMINAL_NOMAD_DRIVER=singularity
            TERMINAL_NOMAD_JOB_ID=hermes-sandbox
            TERMINAL_NOMAD_IMAGE=atropos-sandbox:local
            TERMINAL_NOMAD_SINGULARITY_IMAGE=/images/sandbox.sif
            TERMINAL_TIMEOUT=60
            """,
            "nomad",
            {
                "address": "http://localhost:4646",
                "driver": "apptainer",
                "job_prefix": "hermes-sandbox",
                "image": "/images/sandbox.sif",
            },
            {},
            id="nomad-singularity",
        ),
        pytest.param(
            """
            TERMINAL_ENV=nomad
            TERMINAL_NOMAD_AUTOSTART=1
            TERMINAL_NOMAD_IMAGE=atropos-sandbox:local
            TERMINAL_TIMEOUT=60
            """,
            "nomad",
            {"autostart": True, "driver": "docker", "image": "atropos-sandbox:local"},
            {},
            id="nomad",
        ),
        pytest.param(
            """
            TERMINAL_ENV=daytona
            TERMINAL_DAYTONA_IMAGE=nikolaik/python-nodejs:python3.11-nodejs20
            TERMINAL_TIMEOUT=60
            """,
            "daytona",
            {},
            {"image": "nikolaik/python-nodejs:python3.11-nodejs20"},
            id="daytona",
        ),
    ],
)


@BLOCKS
def test_the_blocks_of_hermes_agent_give_provider_options_and_image(caplog, block, provider, options, spec):
    config = PoolConfig.from_env(dict(line.strip().split("=", 1) for line in block.strip().splitlines()))
    assert (config.provider, config.provider_options, config.exec_timeout_s) == (provider, options, 60)
    given = config.spec.model_dump(exclude_unset=True)
    assert given == {"network": "host", **spec}
    assert caplog.text == ""
    if provider in BUILT_IN:
        load_provider(provider, ProviderContext.of(config, "owner"), config.provider_options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TERMINAL_NOMAD_RAW_EXEC_PORT", "8080"),
        ("TERMINAL_DOCKER_VOLUMES", '["/a:/a"]'),
    ],
)
def test_what_slots_do_not_do_is_said_only_when_it_is_asked_for(caplog, name, value):
    PoolConfig.from_env({name: ""})
    assert caplog.text == ""
    PoolConfig.from_env({name: value})
    assert f"{name} has no effect: " in caplog.text


def test_a_folder_of_the_machine_is_not_taken_into_the_slot(caplog):
    assert PoolConfig.from_env({"TERMINAL_ENV": "docker", "TERMINAL_CWD": "/home/jim"}).spec.workdir is None
    assert "TERMINAL_CWD=/home/jim is a folder of this machine" in caplog.text
