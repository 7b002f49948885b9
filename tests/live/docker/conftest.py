"""Engines for the tests of this folder: each is started once; tests of one that cannot be had are skipped."""

import contextlib
import json

import pytest

from sandbox_pool import PoolConfig
from sandbox_pool.providers.base import ProviderContext, load_provider
from support import container_engines
from support.containers import Unavailable, runsc

STARTS = {
    "docker": container_engines.docker,
    "podman": container_engines.podman,
    "rootless": lambda: container_engines.podman("nobody"),
}


@pytest.fixture(scope="session")
def engines():
    """Gives the engine of a name, started when it is first asked for."""
    with contextlib.ExitStack() as stack:
        found = {}

        def engine(name):
            if name not in found:
                try:
                    found[name] = stack.enter_context(STARTS[name]())
                except Unavailable as error:
                    found[name] = str(error)
            if isinstance(found[name], str):
                pytest.skip(found[name])
            return found[name]

        yield engine


@pytest.fixture(scope="session")
def gvisor(tmp_path_factory):
    """A docker engine that knows gVisor."""
    settings = tmp_path_factory.mktemp("gvisor") / "daemon.json"
    try:
        # No cgroups and no network: test machines lack what they take.
        runtime = {"path": runsc(), "runtimeArgs": ["--platform=systrap", "--network=none", "--ignore-cgroups"]}
        settings.write_text(json.dumps({"runtimes": {"runsc": runtime}}))
        with container_engines.docker(f"--config-file={settings}") as engine:
            yield engine
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=["docker", "podman"])
def engine(request, engines):
    return engines(request.param)


@pytest.fixture
def make_config(engine, tmp_path):
    def make(*, options=None, **settings):
        return config_of(engine, tmp_path, options or {}, settings)

    return make


def config_of(engine, folder, options, settings):
    """A pool of one container of the quick image."""
    return PoolConfig(
        provider=engine.kind,
        provider_options=engine.options(**options),
        state_dir=folder / "state",
        **{"slots_per_host": 4, "max_hosts": 1, "start_attempts": 1, **settings},
    )


@pytest.fixture
def make_gvisor_config(gvisor, tmp_path):
    def make(*, options=None, **settings):
        # Sockets of gVisor do not lead out of it, so slots are reached by exec.
        chosen = {"runtime": "runsc", "cap_add": ["SYS_ADMIN"], "data_path": "exec", **(options or {})}
        return config_of(gvisor, tmp_path, chosen, settings)

    return make


@pytest.fixture
async def make_provider(make_config):
    """Providers of a pool that is not there; their containers and connections end with the test."""
    made = []

    def make(owner="machine_boot_ns_1_1", **options):
        config = make_config(options=options)
        provider = load_provider(config.provider, ProviderContext.of(config, owner), config.provider_options)
        made.append(provider)
        return provider

    yield make
    for provider in made:
        for name in {record.name for record in await provider.list()} | {"hrl-a", "hrl-b", "hrl-c"}:
            await provider.stop(name)
        await provider.close()
