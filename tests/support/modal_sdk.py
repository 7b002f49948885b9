"""The modal SDK of this process, pointed at an emulator for the length of a test.

The SDK keeps one client per process, made from the environment at its first use; here each test gets its own.
"""

import contextlib
import os

import modal

from emulators.modal import ModalEmulator


@contextlib.contextmanager
def environ(values):
    """The environment of this process with these variables."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.asynccontextmanager
async def sdk(emulator: ModalEmulator, **variables: str):
    """While this lasts, `modal.*` without a client talks to this emulator. Gives the client."""
    with environ({**emulator.environ, **variables}):
        client = await modal.Client.from_credentials.aio(os.environ["MODAL_TOKEN_ID"], os.environ["MODAL_TOKEN_SECRET"])
        modal.Client.set_env_client(client)
        try:
            yield client
        finally:
            modal.Client.set_env_client(None)
            await client._close.aio()
