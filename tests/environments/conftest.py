"""Fixtures of the environments' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests

from support.atropos_api import RunApi, run_api
from support.browser import BINARY, chromium


@pytest.fixture(scope="session")
def long_lived_api() -> Iterator[RunApi]:
    with run_api() as running:
        yield running


@pytest.fixture
def api(long_lived_api: RunApi) -> RunApi:
    """A run-api that nobody has registered with; shared, because starting one takes two seconds. Not to be killed."""
    requests.get(long_lived_api.url + "/reset_data", timeout=30)
    return long_lived_api


@pytest.fixture
def mortal_api() -> Iterator[RunApi]:
    """A run-api of the test's own, to be killed and restarted."""
    with run_api() as running:
        yield running


@pytest.fixture(scope="session")
def browser() -> Iterator[str]:
    """The address of a Chromium that all tests share; each opens tabs of its own."""
    if BINARY is None:
        pytest.skip("Chromium is not installed")
    with chromium() as address:
        yield address
