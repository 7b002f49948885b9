"""Images made by hand, and a pool with a layer store of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox_pool import PoolConfig, SlotPool
from sandbox_pool.config import ImageSettings
from support.image_layouts import BUSYBOX, Made, base_layer
from support.image_registry import PROGRAM, RunningRegistry, running_registry

CONFIG = {
    "Env": ["PATH=/opt/tool/bin:/bin", "GREETING=a b=c", "HOME_SWEET=$HOME"],
    "WorkingDir": "/app",
    "User": "app",
}


@pytest.fixture(scope="session")
def base() -> bytes:
    """The layer that most images here stand on."""
    if BUSYBOX is None:
        pytest.skip("busybox (Debian's busybox-static) is not installed")
    return base_layer()


@pytest.fixture(scope="module")
def app(base: bytes) -> Made:
    """An image with a user, an environment and a working directory."""
    return Made([base], CONFIG)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    """Debian's registry, without login."""
    if PROGRAM is None:
        pytest.skip("docker-registry is not installed")
    with running_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture(scope="module")
def store_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "layers"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory: pytest.TempPathFactory, store_dir: Path) -> AsyncIterator[SlotPool]:
    """A local pool whose layers are in a store of its own."""
    state = tmp_path_factory.mktemp("state")
    config = PoolConfig(slots_per_host=3, max_hosts=1, state_dir=state, images=ImageSettings(store_dir=store_dir))
    async with SlotPool.from_config(config) as running:
        yield running
