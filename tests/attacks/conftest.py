"""A slot server at each isolation level this machine offers. Tests are named after what an attack must not achieve."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.slot_server import NOBODY, Server, server_at_level

LEVELS = (
    [
        ("namespaces-root", None),
        ("namespaces-rootless", NOBODY),
        ("namespaces-nouser", None),
        ("landlock", None),
        ("landlock", NOBODY),
    ]
    if os.geteuid() == 0
    else [("namespaces-rootless", None), ("landlock", None)]
)


def name(level: tuple[str, int | None]) -> str:
    return f"{level[0]}{'-ordinary' if level == ('landlock', NOBODY) else ''}"


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS, ids=name)
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    async with server_at_level(*request.param) as running:
        yield running
