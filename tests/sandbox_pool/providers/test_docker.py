"""What the docker provider does before any engine answers; the engines themselves are in tests/live/docker."""

import pytest

from sandbox_pool import SandboxSpec
from sandbox_pool.errors import PlaceUnreachable
from sandbox_pool.providers.base import ProviderContext, load_provider
from sandbox_pool.providers.docker.docker_engine import DockerOptions, open_engine


@pytest.fixture
def no_engine(monkeypatch, tmp_path):
    """A user without engines, contexts or settings."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "CONTAINER_HOST", "DOCKER_TLS_VERIFY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.parametrize("kind", ["docker", "podman"])
async def test_an_engine_that_is_not_there_is_unreachable(kind, tmp_path):
    context = ProviderContext(owner="machine_boot_ns_1_1", slots=1, state_dir=tmp_path)
    provider = load_provider(kind, context, {"host": f"unix://{tmp_path}/none"})
    with pytest.raises(PlaceUnreachable, match="none"):
        await provider.start("hrl-x", SandboxSpec())
    await provider.close()


@pytest.mark.parametrize(("kind", "variable"), [("docker", "DOCKER_HOST"), ("podman", "CONTAINER_HOST")])
async def test_the_variable_of_the_engines_own_command_says_where_it_is(no_engine, monkeypatch, kind, variable):
    monkeypatch.setenv(variable, "tcp://engine.example:2375")
    async with open_engine(kind, DockerOptions()) as engine:
        assert engine.docker_host == "tcp://engine.example:2375"
    async with open_engine(kind, DockerOptions(host="tcp://other.example:2375")) as engine:
        assert engine.docker_host == "tcp://other.example:2375"


async def test_a_context_that_does_not_exist_is_named(no_engine, tmp_path):
    with pytest.raises(PlaceUnreachable, match="nosuch"):
        open_engine("docker", DockerOptions(context="nosuch"))


@pytest.mark.parametrize(
    ("gpus", "docker", "podman"),
    [
        ("all", {"Count": -1}, ["nvidia.com/gpu=all"]),
        ("0,2", {"DeviceIDs": ["0", "2"]}, ["nvidia.com/gpu=0", "nvidia.com/gpu=2"]),
    ],
)
def test_gpus_are_asked_for_as_each_engine_wants_it(tmp_path, gpus, docker, podman):
    context = ProviderContext(owner="machine_boot_ns_1_1", slots=1, state_dir=tmp_path)
    requested = [
        load_provider(kind, context, {"gpus": gpus})._config("n", "i", {}, shared=False)["HostConfig"]
        for kind in ("docker", "podman")
    ]
    assert requested[0]["DeviceRequests"] == [{**docker, "Capabilities": [["gpu"]]}]
    assert [each["PathOnHost"] for each in requested[1]["Devices"]] == podman
