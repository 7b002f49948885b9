"""A slot server at each isolation level this machine offers. Tests are named after what an attack must not achieve."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from support.slot_server import NOBODY, Server, server_at_level

LEVELS: list[Any] = (
    [
        pytest.param(("namespaces-root", None), id="namespaces-root"),
        pytest.param(("namespaces-rootless", NOBODY), id="namespaces-rootless"),
        pytest.param(("namespaces-nouser", None), id="namespaces-nouser"),
        pytest.param(("landlock", None), id="landlock"),
        pytest.param(("landlock", NOBODY), id="landlock-ordinary", marks=pytest.mark.slow),
    ]
    if os.geteuid() == 0
    else [
        pytest.param(("namespaces-rootless", None), id="namespaces-rootless"),
        pytest.param(("landlock", None), id="landlock"),
    ]
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS)
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    async with server_at_level(*request.param) as running:
        yield running
