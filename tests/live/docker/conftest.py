"""Engines for the tests of this folder: each is started once; tests of one that cannot be had are skipped."""

import contextlib

import pytest

from sandbox_pool import PoolConfig
from sandbox_pool.providers.base import ProviderContext, load_provider
from support import container_engines
from support.containers import Unavailable

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


@pytest.fixture(params=["docker", "podman"])
def engine(request, engines):
    return engines(request.param)


@pytest.fixture
def make_config(engine, tmp_path):
    def make(*, options=None, **settings):
        return PoolConfig(
            provider=engine.kind,
            provider_options=engine.options(**(options or {})),
            state_dir=tmp_path / "state",
            **{"slots_per_host": 4, "max_hosts": 1, "start_attempts": 1, **settings},
        )

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
