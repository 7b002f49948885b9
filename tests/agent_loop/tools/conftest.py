"""Real sandboxes for the tools: one pool per isolation level for the whole run, one lease per test."""

import itertools

import pytest
import pytest_asyncio

from agent_loop.tools import SandboxTools, ToolConfig
from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from support.tools_calls import Tools

_numbers = itertools.count(1)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=["strongest", "plain"])
async def pool(request, tmp_path_factory):
    options = {} if request.param == "strongest" else {"level": request.param}
    config = PoolConfig(
        provider="local",
        slots_per_host=4,
        max_hosts=1,
        provider_options=options,
        state_dir=tmp_path_factory.mktemp("state"),
        handle_sigterm=False,
    )
    async with SlotPool.from_config(config) as running:
        yield running


@pytest.fixture
def spec():
    return SandboxSpec(env={"API_TOKEN": "s3cr3t-value-of-ours"}, memory_mb=1024, disk_mb=512)


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox(pool, spec):
    async with pool.lease(f"tools-{next(_numbers)}", spec) as leased:
        yield leased


@pytest.fixture
def config():
    return ToolConfig(default_timeout_s=20, max_timeout_s=30)


@pytest.fixture
def toolsets():
    return ("terminal", "file", "code_execution", "todo")


@pytest_asyncio.fixture(loop_scope="session")
async def tools(sandbox, config, toolsets):
    async with SandboxTools(sandbox, toolsets, config) as runtime:
        yield Tools(runtime, sandbox)
