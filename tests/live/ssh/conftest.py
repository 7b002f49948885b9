"""A real sshd on loopback for all tests of a module, with keys and a config of its own; every test leaves it empty."""

import shutil
import tempfile
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig
from sandbox_pool.journal.owner import this_process
from sandbox_pool.providers.base import ProviderContext, load_provider
from support.pool_leftovers import processes
from support.pool_wait import eventually
from support.ssh_machines import MISSING, SSHD, Keys, LoopbackMachine


def pytest_collection_modifyitems(items):
    if SSHD is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="module")
def keys():
    # Not tmp_path: slots need a short path that other users may pass through.
    folder = Path(tempfile.mkdtemp(prefix="hrl-ssh-"))
    folder.chmod(0o711)
    try:
        yield Keys(folder / "keys")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def loopback(keys):
    machine = LoopbackMachine(keys, "a")
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture
async def place(keys, tmp_path, loopback):
    """Settings of pools on the loopback machine; afterwards neither files nor processes are left there."""
    place = Place(keys, tmp_path)
    yield place
    # Slot servers, the programs that start them, and ssh itself, by what their command lines name.
    ours = (place.scratch, keys.folder / "cache-", keys.config)
    await eventually(lambda: not [found for path in ours for found in processes(path, [])])
    assert list(place.scratch.rglob("*")) == []


class Place:
    """A scratch space on the loopback machine and a state directory here."""

    def __init__(self, keys, tmp_path):
        self.keys = keys
        self.state = tmp_path / "state"
        self.scratch = Path(tempfile.mkdtemp(prefix="s-", dir=keys.folder.parent))
        self.scratch.chmod(0o711)

    def options(self, **options):
        return {"machines": ["a"], "config": str(self.keys.config), **options}

    def config(self, options=None, **fields):
        settings = {"slots_per_host": 2, "max_hosts": 1, "start_attempts": 1, **fields}
        return PoolConfig(
            provider="ssh",
            provider_options=self.options(**(options or {})),
            state_dir=self.state,
            scratch_dir=self.scratch,
            **settings,
        )

    def provider(self, options=None, **fields):
        """One as a process of its own would make it."""
        config = self.config(options, **fields)
        context = ProviderContext.of(config, this_process().tag())
        return load_provider("ssh", context, config.provider_options)
