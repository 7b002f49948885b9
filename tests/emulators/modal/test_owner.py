"""The emulator as a program, and its sandboxes when it is killed."""

import asyncio
import os
import select
import signal
import sys
import tempfile
from pathlib import Path

import modal
import pytest

from emulators.modal import ModalEmulator, Unavailable
from emulators.modal.backends import Namespaces, processes
from support.modal_sdk import environ

ROOT = Path(__file__).parents[3]


def emulator_or_skip(runtime="namespaces"):
    try:
        return ModalEmulator(runtime=runtime)
    except Unavailable as reason:
        pytest.skip(str(reason))


async def program(*options):
    """Started by hand, as another process would find it; gives it and the environment it prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "emulators.modal", *options,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    )  # fmt: skip
    exports = {}
    while "NO_PROXY" not in exports:
        name, _, value = (await process.stdout.readline()).decode().removeprefix("export ").strip().partition("=")
        exports[name] = value
    return process, exports


async def sandbox_of(exports, **options):
    """A sandbox made by the SDK of this process in that emulator."""
    with environ(exports):
        client = await modal.Client.from_credentials.aio(exports["MODAL_TOKEN_ID"], exports["MODAL_TOKEN_SECRET"])
        try:
            app = await modal.App.lookup.aio("x", create_if_missing=True, client=client)
            return await modal.Sandbox.create.aio("sleep", "1000", app=app, client=client, **options)
        finally:
            await client._close.aio()


WAYS = [
    pytest.param(signal.SIGTERM, "namespaces", id="terminated"),
    pytest.param(signal.SIGKILL, "namespaces", id="killed"),
    pytest.param(signal.SIGKILL, "gvisor", id="killed-gvisor", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("end", "runtime"), WAYS)
async def test_sandboxes_die_with_the_emulator_however_it_ends(end, runtime, tmp_path):
    emulator_or_skip(runtime)
    emulator, exports = await program(*(["--gvisor"] if runtime == "gvisor" else []), "--create-delay", "0.1")
    sandbox = await sandbox_of(exports)
    alive = [os.pidfd_open(pid) for pid in processes(Namespaces(tmp_path, sandbox.object_id))]
    emulator.send_signal(end)
    assert await emulator.wait() == (0 if end == signal.SIGTERM else -end)
    assert len(alive) >= 2
    for pidfd in alive:
        assert await asyncio.to_thread(select.select, [pidfd], [], [], 10) == ([pidfd], [], [])
        os.close(pidfd)


async def test_folders_of_killed_emulators_are_swept_and_those_of_living_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = tmp_path / "modal-emulator-dead"
    dead.mkdir()
    async with emulator_or_skip() as first, emulator_or_skip() as second:
        folders = {str(Path(emulator.environ["SSL_CERT_FILE"]).parent) for emulator in (first, second)}
        assert {str(folder) for folder in tmp_path.iterdir()} == folders
    assert list(tmp_path.iterdir()) == []
