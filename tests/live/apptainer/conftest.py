"""An ordinary user with the real apptainer; every test leaves neither instances nor files."""

import shutil
import tempfile
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig
from sandbox_pool.journal.owner import this_process
from sandbox_pool.providers.base import ProviderContext, load_provider
from support.apptainer_place import ApptainerPlace
from support.containers import Unavailable
from support.pool_leftovers import processes
from support.pool_wait import eventually


@pytest.fixture(scope="session")
def apptainer():
    # Not tmp_path: sockets need a short path that another user may pass through.
    folder = Path(tempfile.mkdtemp(prefix="hrl-a-", dir="/tmp"))
    try:
        yield ApptainerPlace(folder)
    except Unavailable as error:
        pytest.skip(str(error))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def make_config(apptainer, tmp_path):
    def make(options=None, **settings):
        return PoolConfig(
            provider="apptainer",
            provider_options=apptainer.options(**(options or {})),
            state_dir=tmp_path / "state",
            scratch_dir=apptainer.scratch,
            **{"slots_per_host": 4, "max_hosts": 1, "start_attempts": 1, **settings},
        )

    yield make
    await eventually(lambda: not processes(apptainer.scratch, []))
    assert apptainer.instances() == {}
    assert apptainer.left() == []


@pytest.fixture
async def make_provider(make_config):
    """Providers as processes of their own would make them."""
    made = []

    def make(**options):
        config = make_config(options)
        context = ProviderContext.of(config, this_process().tag())
        made.append(load_provider("apptainer", context, config.provider_options))
        return made[-1]

    yield make
    for provider in made:
        for name in ("hrl-one", "hrl-bad"):
            await provider.stop(name)
        await provider.close()
