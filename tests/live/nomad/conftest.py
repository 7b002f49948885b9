"""One private agent for all tests of a session; every test leaves it without jobs and without processes."""

import asyncio
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from sandbox_pool import PoolConfig
from support.nomad_agent import MISSING, Agent, find_nomad


def pytest_collection_modifyitems(items):
    if find_nomad() is None:
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def shared_agent():
    # Not tmp_path: slots need a short path that other users may pass through.
    folder = Path(tempfile.mkdtemp(prefix="hrl-nomad-"))
    folder.chmod(0o711)
    agent = Agent(folder / "agent").start()
    try:
        agent.wait_ready()
        agent.pool_secret = agent.pool_token()
        yield agent
    finally:
        agent.close()
        shutil.rmtree(folder, ignore_errors=True)


def assert_nothing_left(agent, timeout_s=10):
    """No child job, no allocation that runs, no process below the agent's data directory."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and (agent.children() or agent.running() or agent.processes()):
        time.sleep(0.1)
    assert agent.children() == []
    assert agent.running() == []
    assert agent.processes() == []


@pytest.fixture
def agent(shared_agent):
    yield shared_agent
    assert_nothing_left(shared_agent)


@pytest.fixture
def make_config(tmp_path, agent):
    """Settings of a pool on the agent; the token comes from a file, as in real use."""

    def make(options=None, **fields):
        acl_file = tmp_path / "nomad.acl"
        acl_file.write_text(agent.pool_secret)
        settings = {
            "provider": "nomad",
            "slots_per_host": 4,
            "max_hosts": 1,
            "start_attempts": 1,
            "create_interval_s": 0.0,
            "state_dir": tmp_path / "state",
            "provider_options": {"address": agent.address, "acl_file": str(acl_file), **(options or {})},
        }
        return PoolConfig(**{**settings, **fields})

    return make


@pytest.fixture
def cluster(agent):
    """Agent calls from inside a loop."""

    async def call(function, *arguments, **named):
        return await asyncio.to_thread(function, *arguments, **named)

    return call
