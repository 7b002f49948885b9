import pytest

from support.modal_place import emulated_modal, modal_config, modal_provider, nothing_left


@pytest.fixture
async def modal():
    """An emulated Modal; the test must leave no sandbox there."""
    async with emulated_modal() as emulator:
        yield emulator
        emulator.faults.clear()
        emulator.accept_credentials(True)
        await nothing_left(emulator)


@pytest.fixture
async def provider(modal, tmp_path):
    async with modal_provider(tmp_path / "state") as made:
        yield made
        for record in await made.list():
            await made.stop(record.name)


@pytest.fixture
def make_config(modal, tmp_path):
    return lambda options=None, **fields: modal_config(tmp_path / "state", options, **fields)
