"""A real Slurm on this machine and an allocation of two nodes; every test leaves neither steps nor files."""

import shutil
import tempfile
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig
from support.containers import Unavailable
from support.pool_leftovers import leftovers
from support.pool_wait import eventually
from support.slurm_cluster import SlurmCluster


@pytest.fixture(scope="session")
def cluster():
    folder = Path(tempfile.mkdtemp(prefix="hrl-s-", dir="/tmp"))
    try:
        made = SlurmCluster(folder)
    except Unavailable as error:
        shutil.rmtree(folder, ignore_errors=True)
        pytest.skip(str(error))
    try:
        yield made
    finally:
        made.close()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def job(cluster, monkeypatch):
    """An allocation of both nodes, which this process is in."""
    for name, text in cluster.environment.items():
        monkeypatch.setenv(name, text)
    job = cluster.allocate()
    monkeypatch.setenv("SLURM_JOB_ID", job)
    yield job
    cluster.run("scancel", job, check=False)


@pytest.fixture
def scratch():
    folder = Path(tempfile.mkdtemp(prefix="hrl-s-", dir="/tmp"))
    folder.chmod(0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def images():
    """A folder for images that other users may pass through."""
    folder = Path(tempfile.mkdtemp(prefix="hrl-a-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def make_config(job, cluster, scratch, tmp_path):
    def make(options=None, **settings):
        return PoolConfig(
            provider="slurm",
            provider_options={"slots_per_core": 64, "memory_mb_per_slot": 1, **(options or {})},
            state_dir=tmp_path / "state",
            scratch_dir=scratch,
            **{"slots_per_host": 2, "min_hosts": 2, "max_hosts": 2, "start_attempts": 1, **settings},
        )

    yield make
    await eventually(lambda: cluster.steps(job) == [] and not leftovers(scratch, []))
    assert [path for path in scratch.rglob("*") if path.name != "hermes-rl-0"] == []
