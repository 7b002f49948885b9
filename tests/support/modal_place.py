"""An emulated Modal for tests of the provider: the emulator, the SDK pointed at it, and proof that nothing is left."""

import contextlib

import pytest

from emulators.modal import ModalEmulator, Unavailable
from sandbox_pool import PoolConfig
from sandbox_pool.providers.base import ProviderContext
from sandbox_pool.providers.modal.modal_provider import ModalProvider
from sandbox_pool.spec import SandboxSpec
from support.modal_sdk import sdk
from support.pool_wait import eventually

SPEC = SandboxSpec()
QUICK = {"ready_timeout_s": 30.0, "create_timeout_s": 20.0, "settle_s": 1.0}
"""Options under which a test that fails does so soon."""


@contextlib.asynccontextmanager
async def emulated_modal(**settings):
    """An emulator that the SDK of this process talks to; skips where there can be none."""
    try:
        emulator = ModalEmulator(**settings)
    except Unavailable as reason:
        pytest.skip(str(reason))
    async with emulator, sdk(emulator):
        yield emulator


async def nothing_left(emulator):
    """Wait a moment, then fail unless every sandbox has ended with all its processes."""
    with contextlib.suppress(TimeoutError):
        await eventually(lambda: not emulator.alive and not emulator.leaked_processes())
    assert emulator.alive == []
    assert emulator.leaked_processes() == []


def modal_config(state_dir, options=None, **fields):
    """Settings of a pool of few slots in few sandboxes."""
    settings = {"slots_per_host": 2, "max_hosts": 1, "start_attempts": 1, "create_interval_s": 0.0}
    options = {**QUICK, **(options or {})}
    return PoolConfig(
        **{"provider": "modal", "state_dir": state_dir, "provider_options": options, **settings, **fields}
    )


@contextlib.asynccontextmanager
async def modal_provider(state_dir, owner="machine_boot_ns_1_1", slots=1, **options):
    """A provider by itself, which remembers what it was told of lost hosts."""
    context = ProviderContext(owner=owner, slots=slots, state_dir=state_dir)
    provider = ModalProvider(context, {**QUICK, **options})
    provider.lost = []
    provider.on_host_lost(lambda name, reason: provider.lost.append((name, reason)))
    try:
        yield provider
    finally:
        await provider.close()
