"""An emulator and an SDK of its own for every test."""

import modal
import pytest

from emulators.modal import ModalEmulator, Unavailable
from support.modal_sdk import sdk


@pytest.fixture
async def emulator(request):
    """Its sandboxes are in namespaces, or in what the test's parameter says."""
    try:
        emulator = ModalEmulator(runtime=getattr(request, "param", "namespaces"))
    except Unavailable as reason:
        pytest.skip(str(reason))
    async with emulator, sdk(emulator):
        yield emulator
    assert emulator.leaked_processes() == []


@pytest.fixture
async def app(emulator):
    return await modal.App.lookup.aio("pool", create_if_missing=True)
