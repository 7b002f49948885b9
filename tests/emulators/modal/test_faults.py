"""What can be made to go wrong, and how the SDK tells it."""

import asyncio

import modal
import pytest
from grpclib import Status
from modal import Sandbox
from modal.exception import AuthError, InternalError, NotFoundError, ResourceExhaustedError, ServiceError

from emulators.modal import TokenBucket
from emulators.modal.steps import shell


async def test_creates_beyond_the_rate_wait_for_their_turn(app, emulator):
    emulator.limits.create_bucket = TokenBucket(rate=10, burst=2)
    made = await asyncio.gather(*(Sandbox.create.aio(app=app) for _ in range(5)))
    assert len(emulator.alive) == len(made) == 5
    assert emulator.calls["SandboxCreateV2"] > 5


async def test_throttling_is_an_error_when_the_sdk_may_not_wait(app, emulator, monkeypatch):
    monkeypatch.setenv("MODAL_MAX_THROTTLE_WAIT", "0")
    emulator.faults.throttle("SandboxCreateV2", 0.1)
    with pytest.raises(ResourceExhaustedError):
        await Sandbox.create.aio(app=app)
    await Sandbox.create.aio(app=app)


async def test_no_more_sandboxes_than_there_is_room_for(app, emulator):
    emulator.limits.max_sandboxes = 1
    first = await Sandbox.create.aio(app=app)
    with pytest.raises(ResourceExhaustedError):
        await Sandbox.create.aio(app=app)
    await first.terminate.aio()
    await Sandbox.create.aio(app=app)


async def test_a_create_whose_answer_was_lost_is_done_once(app, emulator):
    emulator.faults.lose("SandboxCreateV2", times=2)
    sandbox = await Sandbox.create.aio(app=app, name="n1")
    assert emulator.alive == [sandbox.object_id]
    assert emulator.calls["SandboxCreateV2"] == 3


async def test_a_create_whose_answers_are_all_lost_leaves_a_sandbox_under_its_name(app, emulator):
    lost = emulator.faults.lose("SandboxCreateV2", times=None)
    with pytest.raises(ServiceError):
        await Sandbox.create.aio(app=app, name="n1")
    emulator.faults.remove(lost)
    assert (await Sandbox.from_name.aio("pool", "n1")).object_id == emulator.alive[0]


async def test_a_failure_before_the_work_leaves_nothing(app, emulator):
    emulator.faults.fail("SandboxCreateV2", Status.INTERNAL, times=10)
    with pytest.raises(InternalError):
        await Sandbox.create.aio(app=app)
    assert emulator.sandboxes == []


async def test_a_fault_by_chance_befalls_some_calls_and_a_pattern_many_rpcs(app, emulator):
    chance = emulator.faults.fail("Sandbox*", times=None, probability=0.3)
    for _ in range(5):
        sandbox = await Sandbox.create.aio(app=app)
        await sandbox.terminate.aio()
    emulator.faults.clear()
    assert 0 < chance.hits < emulator.calls["SandboxCreateV2"] + emulator.calls["SandboxTerminateV2"]


async def test_a_delayed_answer_comes_later_than_the_work(app, emulator):
    emulator.faults.delay("SandboxTerminateV2", after_s=30)
    sandbox = await Sandbox.create.aio(app=app)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(sandbox.terminate.aio(), 0.5)
    assert emulator.alive == []


async def test_a_forgotten_sandbox_is_not_found(app, emulator):
    sandbox = await Sandbox.create.aio(app=app)
    await emulator.forget(sandbox.object_id)
    for lost in (sandbox.poll.aio(), sandbox.terminate.aio(), sandbox.exec.aio("true")):
        with pytest.raises(NotFoundError):
            await lost
    assert [gone.id for gone in emulator.sandboxes] == [sandbox.object_id]


async def test_a_preempted_sandbox_is_gone_though_its_code_may_be_zero(app, emulator):
    sandbox = await Sandbox.create.aio(app=app)
    await emulator.preempt(sandbox.object_id)
    assert await sandbox.poll.aio() == 0
    assert emulator.alive == []


async def test_the_sdk_gets_a_new_token_for_one_that_expires(app, emulator):
    emulator.limits.router_token_s = 20
    sandbox = await Sandbox.create.aio(app=app)
    assert await shell(sandbox, "echo 1") == (0, "1\n", "")
    emulator.expire_tokens()
    assert await shell(sandbox, "echo 2") == (0, "2\n", "")
    assert emulator.calls["SandboxGetCommandRouterAccess"] >= 1


async def test_the_sdk_keeps_a_token_that_was_revoked_long_before_its_end(app, emulator):
    sandbox = await Sandbox.create.aio(app=app)
    emulator.expire_tokens()
    with pytest.raises(AuthError):
        await sandbox.exec.aio("true")
    again = await Sandbox.from_id.aio(sandbox.object_id)
    assert await shell(again, "echo 2") == (0, "2\n", "")


async def test_wrong_and_revoked_credentials_are_refused(app, emulator):
    stranger = await modal.Client.from_credentials.aio("ak-x", "as-y")
    with pytest.raises(AuthError):
        await modal.App.lookup.aio("pool", client=stranger)
    await stranger._close.aio()
    emulator.accept_credentials(False)
    with pytest.raises(AuthError):
        await Sandbox.create.aio(app=app)


async def test_what_is_not_emulated_says_so(app):
    sandbox = await Sandbox.create.aio(app=app)
    with pytest.raises(modal.exception.UnimplementedError, match="not emulated"):
        await sandbox.snapshot_filesystem.aio()


async def test_tokens_of_the_control_plane_are_renewed_at_their_end_but_not_when_revoked_before_it(app, emulator):
    emulator.limits.auth_token_s = 1
    await Sandbox.create.aio(app=app)
    await asyncio.sleep(1.1)
    emulator.limits.auth_token_s = 600
    await Sandbox.create.aio(app=app)
    assert emulator.calls["AuthTokenGet"] >= 2
    emulator.expire_auth_tokens()
    with pytest.raises(AuthError):
        await Sandbox.create.aio(app=app)
