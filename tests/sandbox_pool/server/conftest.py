"""One server per test module, a fresh lease per test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from sandbox_pool.client.sandbox import Sandbox
from support.slot_server import Server, running_server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    async with running_server() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox(server: Server) -> AsyncIterator[Sandbox]:
    async with server.lease() as leased:
        yield leased
