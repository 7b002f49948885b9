"""The same suite on a real Modal account: conformance through the tunnel and through exec, one death, one sweep.

Runs when the SDK finds a token (`modal token new`, or MODAL_TOKEN_ID and MODAL_TOKEN_SECRET), and costs a few cents:
`pytest -m slow tests/live/modal/test_account.py`. Everything happens in an app of its own.
"""

import asyncio
import os
import secrets
from pathlib import Path

import modal
import pytest

from sandbox_pool import SandboxLost, SlotPool
from sandbox_pool.conformance import all_checks, run_checks
from sandbox_pool.conformance.runner import make_context
from support.modal_place import SPEC, modal_config, modal_provider

CONFIG = Path(os.environ.get("MODAL_CONFIG_PATH", "~/.modal.toml")).expanduser()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not (os.environ.get("MODAL_TOKEN_ID") or CONFIG.is_file()), reason="no Modal token here: run `modal token new`"
    ),
]
SLOW = ("hundred_megabytes", "many_small_files", "says_that_it_is_alive")
OPTIONS = {"create_timeout_s": 120.0, "ready_timeout_s": 120.0, "timeout_s": 1800, "drain_s": 900, "settle_s": 5.0}
POOL = {"start_timeout_s": 900, "health_interval_s": 1.0}


@pytest.fixture
def app():
    """An app of this test's own, so that what it leaves can be told from everything else."""
    return f"hermes-rl-test-{secrets.token_hex(4)}"


async def left_in(app, state_dir):
    async with modal_provider(state_dir, **OPTIONS, app=app) as provider:
        return await provider.list()


@pytest.mark.parametrize("path", ["tunnel", "exec"])
async def test_every_promise_of_the_level_that_modal_allows_is_kept(app, tmp_path, path):
    checks = [check for check in all_checks() if not any(slow in check.id for slow in SLOW)]
    config = modal_config(tmp_path, {**OPTIONS, "app": app, "data_path": path}, slots_per_host=12, **POOL)
    async with SlotPool.from_config(config) as pool:
        context = await make_context(pool)
        results = [result async for result in run_checks(checks, context, 2)]
        context.close()
    print("isolation", context.info.isolation, context.info.variant, "missing", context.info.missing)
    assert {each.id: each.detail for each in results if each.verdict == "failed"} == {}
    assert await left_in(app, tmp_path) == []


async def test_a_sandbox_that_is_ended_from_outside_is_lost_and_replaced(app, tmp_path):
    config = modal_config(tmp_path, {**OPTIONS, "app": app}, **POOL)
    async with SlotPool.from_config(config) as pool:
        box = await pool.acquire("rollout")
        running = asyncio.create_task(box.exec("sleep 600"))
        sandbox = await modal.Sandbox.from_id.aio(box.endpoint.identity)
        await sandbox.terminate.aio()
        with pytest.raises(SandboxLost):
            async with asyncio.timeout(120):
                await running
        await box.release()
        async with pool.lease("again") as other:
            assert (await other.exec("echo alive")).output == "alive\n"
    assert await left_in(app, tmp_path) == []


async def test_a_create_that_was_cancelled_leaks_nothing(app, tmp_path):
    async with modal_provider(tmp_path, **OPTIONS, app=app) as provider:
        await provider.start("warm", SPEC)
        await provider.stop("warm")
        for delay_s in (0.05, 0.3, 1.0):
            task = asyncio.create_task(provider.start("cut", SPEC))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await provider.stop("cut")
        assert await provider.list() == []
