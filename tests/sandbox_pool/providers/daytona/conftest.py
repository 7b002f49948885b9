"""An emulated Daytona for each test; pools that use it end with it."""

import asyncio
import os
import threading

import pytest

from emulators.daytona.emulator import API_KEY, DaytonaEmulator
from sandbox_pool import PoolConfig


class InThread:
    """The emulator in a loop of its own, so that a client which blocks or is another process reaches it."""

    def __init__(self):
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.daytona = DaytonaEmulator()
        self.call(self.daytona.__aenter__())

    def call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self):
        self.call(self.daytona.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def place():
    if os.getuid() != 0:
        pytest.skip("sandboxes of the emulator need root")
    place = InThread()
    yield place
    place.close()


@pytest.fixture
def make_config(place, tmp_path):
    def make(options=None, **settings):
        named = {
            "api_key": API_KEY,
            "api_url": f"{place.daytona.url}/api",
            "python": "/usr/bin/python3",
            **(options or {}),
        }
        return PoolConfig(
            provider="daytona",
            provider_options=named,
            state_dir=tmp_path / "state",
            **{"slots_per_host": 4, "max_hosts": 1, "start_attempts": 1, **settings},
        )

    return make
