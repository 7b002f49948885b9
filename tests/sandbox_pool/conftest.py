import contextlib

import pytest

from sandbox_pool import PoolConfig, SlotPool
from support.pool_fake_host import FakePlace


@pytest.fixture
def make_pool(tmp_path):
    """A pool over a fake place, started and closed by the test's own `async with`."""

    @contextlib.asynccontextmanager
    async def make(place=None, **config):
        place = place or FakePlace()
        settings = {"slots_per_host": place.slots, "create_interval_s": 0.0, "max_hosts": 1, "health_interval_s": 60.0}
        pool = SlotPool(
            PoolConfig(provider="fake:Place", state_dir=tmp_path / "state", **{**settings, **config}),
            provider=place,
            connect=place.connect,
        )
        pool.place = place
        async with pool:
            yield pool

    return make
