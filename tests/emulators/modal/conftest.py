"""An emulator and an SDK of its own for every test."""

import modal
import pytest

from emulators.modal import ModalEmulator, Unavailable
from support.modal_sdk import sdk


@pytest.fixture
async def emulator():
    try:
        emulator = ModalEmulator()
    except Unavailable as reason:
        pytest.skip(str(reason))
    async with emulator, sdk(emulator):
        yield emulator
        assert emulator.leaked_processes() == []


@pytest.fixture
async def app(emulator):
    return await modal.App.lookup.aio("pool", create_if_missing=True)
