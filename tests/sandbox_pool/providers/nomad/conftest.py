import contextlib

import pytest

from sandbox_pool.providers.base import ProviderContext
from sandbox_pool.providers.nomad.nomad_provider import NomadProvider
from support.nomad_recorded import RecordedNomad


@pytest.fixture
async def nomad(monkeypatch):
    for name in ("NOMAD_ADDR", "NOMAD_TOKEN", "NOMAD_NAMESPACE", "NOMAD_REGION"):
        monkeypatch.delenv(name, raising=False)
    async with RecordedNomad() as cluster:
        yield cluster


@pytest.fixture
async def make_provider(nomad, tmp_path):
    """Providers on the recorded cluster; hosts and connections end with the test."""
    made = []

    def make(owner="machine_boot_ns_1_1", **options):
        context = ProviderContext(owner=owner, slots=1, state_dir=tmp_path / "state", min_isolation="plain")
        settings = {"address": nomad.address, "relist_s": 0.3, "level": "plain", "api_timeout_s": 3.0}
        provider = NomadProvider(context, {**settings, **options})
        provider.lost = []
        provider.on_host_lost(lambda name, reason: provider.lost.append((name, reason)))
        made.append(provider)
        return provider

    yield make
    nomad.stuck, nomad.tokens, nomad.lose = False, None, []
    for provider in made:
        with contextlib.suppress(Exception):
            for record in await provider.list():
                await provider.stop(record.name)
        await provider.close()
