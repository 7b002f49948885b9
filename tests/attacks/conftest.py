"""A slot server at each isolation level this machine offers. Tests are named after what an attack must not achieve."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from support.slot_server import NOBODY, Server, running_server

SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/bin")
LEVELS = (
    [("namespaces-root", None), ("namespaces-rootless", NOBODY), ("namespaces-nouser", None), ("landlock", None)]
    if os.geteuid() == 0
    else [("namespaces-rootless", None), ("landlock", None)]
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS, ids=lambda level: level[0])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    level, user = request.param
    if user is not None and SYSTEM_PYTHON is None:
        pytest.skip("no Python that an ordinary user may run")
    python = {} if user is None else {"python": SYSTEM_PYTHON}
    try:
        async with running_server("--level", level, user=user, **python) as running:  # type: ignore[arg-type]
            yield running
    except RuntimeError as error:
        pytest.skip(f"this machine cannot do it: {error}")
