"""One real sandbox per test, on the strongest isolation that this machine has."""

import itertools

import pytest_asyncio

from agent_loop.tools import SandboxTools, ToolConfig
from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from support.tools_calls import Tools

_numbers = itertools.count(1)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pool(tmp_path_factory):
    state = tmp_path_factory.mktemp("state")
    config = PoolConfig(provider="local", slots_per_host=2, max_hosts=1, state_dir=state, handle_sigterm=False)
    async with SlotPool.from_config(config) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def tools(pool):
    config = ToolConfig(default_timeout_s=20, max_timeout_s=30, max_processes=1)
    async with (
        pool.lease(f"compat-{next(_numbers)}", SandboxSpec(memory_mb=1024, disk_mb=512)) as sandbox,
        SandboxTools(sandbox, ("terminal", "file", "code_execution"), config) as runtime,
    ):
        yield Tools(runtime, sandbox)
