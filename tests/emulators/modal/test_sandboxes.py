"""Sandboxes through the SDK: names, tags, lists, ends, and the walls between them."""

import asyncio
from pathlib import Path

import modal
import pytest
from modal import Sandbox
from modal.exception import AlreadyExistsError, NotFoundError, SandboxTimeoutError

from emulators.modal.steps import shell
from support.pool_wait import eventually


async def test_an_app_is_made_only_when_asked_to(emulator):
    with pytest.raises(NotFoundError):
        await modal.App.lookup.aio("nope")
    made = await modal.App.lookup.aio("pool", create_if_missing=True)
    assert (await modal.App.lookup.aio("pool")).app_id == made.app_id


async def test_a_running_sandbox_is_found_by_name_id_and_tags(app):
    sandbox = await Sandbox.create.aio(app=app, name="n1", tags={"pool": "x"})
    await Sandbox.create.aio(app=app, tags={"pool": "y"})
    listed = [found.object_id async for found in Sandbox.list.aio(app_id=app.app_id, tags={"pool": "x"})]
    assert listed == [sandbox.object_id]
    assert (await Sandbox.from_name.aio("pool", "n1")).object_id == sandbox.object_id
    again = await Sandbox.from_id.aio(sandbox.object_id)
    assert await shell(again, "echo here") == (0, "here\n", "")
    await again.set_tags.aio({"owner": "z"})
    assert await sandbox.get_tags.aio() == {"owner": "z"}
    await again.detach.aio()
    assert await sandbox.poll.aio() is None


async def test_a_list_has_all_of_its_pages(app, emulator):
    emulator.limits.page_size = 2
    made = await asyncio.gather(*(Sandbox.create.aio(app=app) for _ in range(5)))
    listed = {found.object_id async for found in Sandbox.list.aio(app_id=app.app_id)}
    assert listed == {sandbox.object_id for sandbox in made}


async def test_a_name_is_unique_among_running_sandboxes_from_the_moment_of_the_create(app, emulator):
    emulator.limits.create_delay_s = 0.3
    tries = await asyncio.gather(*(Sandbox.create.aio(app=app, name="n1") for _ in range(3)), return_exceptions=True)
    assert sorted(type(result).__name__ for result in tries) == ["AlreadyExistsError", "AlreadyExistsError", "Sandbox"]
    (sandbox,) = [result for result in tries if isinstance(result, Sandbox)]
    await sandbox.terminate.aio()
    second = await Sandbox.create.aio(app=app, name="n1")
    assert (await Sandbox.from_name.aio("pool", "n1")).object_id == second.object_id
    with pytest.raises(AlreadyExistsError):
        await Sandbox.create.aio(app=app, name="n1")


async def test_a_terminated_sandbox_is_gone_for_everyone(app):
    sandbox = await Sandbox.create.aio(app=app, name="n1")
    await sandbox.terminate.aio()
    await sandbox.wait.aio(raise_on_termination=False)
    assert sandbox.returncode == 137
    assert [found async for found in Sandbox.list.aio(app_id=app.app_id)] == []
    with pytest.raises(NotFoundError):
        await Sandbox.from_name.aio("pool", "n1")
    with pytest.raises((NotFoundError, modal.exception.ConflictError)):
        await sandbox.exec.aio("true")
    with pytest.raises(NotFoundError):
        await Sandbox.from_id.aio("sb-" + "0" * 26)


async def test_a_sandbox_that_is_still_starting_can_be_found_and_terminated(app, emulator):
    emulator.limits.create_delay_s = 30
    create = asyncio.ensure_future(Sandbox.create.aio(app=app, name="slow"))
    await eventually(lambda: emulator.alive)
    found = await Sandbox.from_name.aio("pool", "slow")
    await found.terminate.aio()
    assert emulator.alive == []
    assert await (await create).poll.aio() == 137


async def test_a_cancelled_create_leaves_its_sandbox_running(app, emulator):
    emulator.limits.create_delay_s = 0.3
    create = asyncio.ensure_future(Sandbox.create.aio(app=app, name="leaks"))
    await eventually(lambda: emulator.alive)
    create.cancel()
    with pytest.raises(asyncio.CancelledError):
        await create
    leaked = await Sandbox.from_name.aio("pool", "leaks")
    assert await shell(leaked, "echo alive") == (0, "alive\n", "")


async def test_the_command_of_a_sandbox_has_input_and_output_and_ends_it(app):
    sandbox = await Sandbox.create.aio("bash", "-c", "read x; echo got $x; echo e >&2; exit 4", app=app)
    sandbox.stdin.write(b"abc\n")
    sandbox.stdin.write_eof()
    await sandbox.stdin.drain.aio()
    assert await sandbox.stdout.read.aio() == "got abc\n"
    assert await sandbox.stderr.read.aio() == "e\n"
    await sandbox.wait.aio()
    assert sandbox.returncode == 4
    missing = await Sandbox.create.aio("no-such-command", app=app)
    await missing.wait.aio()
    assert missing.returncode == 127


async def test_a_sandbox_with_a_gpu_takes_the_older_calls(app, emulator):
    sandbox = await Sandbox.create.aio("bash", "-c", "echo out; read x; echo $x", app=app, gpu="T4")
    assert emulator.calls["SandboxCreate"] == 1
    assert emulator.calls["SandboxCreateV2"] == 0
    assert await shell(sandbox, "echo hi") == (0, "hi\n", "")
    sandbox.stdin.write("zz\n")
    sandbox.stdin.write_eof()
    await sandbox.stdin.drain.aio()
    assert await sandbox.stdout.read.aio() == "out\nzz\n"
    await sandbox.wait.aio()
    assert sandbox.returncode == 0


async def test_environment_secrets_and_working_directory_are_the_sandboxs(app, emulator):
    emulator.secrets["keys"] = {"C": "3"}
    secrets = [modal.Secret.from_dict({"B": "2"}), modal.Secret.from_name("keys")]
    sandbox = await Sandbox.create.aio(app=app, env={"A": "1"}, secrets=secrets, workdir="/new/place")
    assert await shell(sandbox, "echo $A$B$C$D; pwd", env={"D": "4"}) == (0, "1234\n/new/place\n", "")
    assert await shell(sandbox, "pwd", workdir="/usr") == (0, "/usr\n", "")


async def test_a_timeout_ends_a_sandbox_whatever_runs_in_it(app):
    sandbox = await Sandbox.create.aio(app=app, timeout=1)
    process = await sandbox.exec.aio("sleep", "100")
    with pytest.raises(SandboxTimeoutError):
        await sandbox.wait.aio()
    assert sandbox.returncode == 124
    with pytest.raises(NotFoundError):
        await process.wait.aio()


async def test_an_idle_timeout_ends_a_sandbox_only_when_nothing_runs_in_it(app, emulator):
    sandbox = await Sandbox.create.aio(app=app, idle_timeout=1)
    assert await shell(sandbox, "sleep 1.5; echo done") == (0, "done\n", "")
    assert emulator.alive == [sandbox.object_id]
    await sandbox.wait.aio()
    assert await sandbox.poll.aio() is not None
    assert emulator.alive == []


async def test_sandboxes_share_neither_files_nor_processes_nor_a_network(app):
    one, other = await asyncio.gather(*(Sandbox.create.aio(app=app, block_network=True) for _ in range(2)))
    await shell(one, "echo A > /root/x; echo T > /tmp/t; sleep 77 >/dev/null 2>&1 &")
    here = await asyncio.to_thread(Path("/root/x").exists)
    assert (await shell(other, "cat /root/x"))[0] == 1
    assert (await shell(other, "cat /tmp/t"))[0] == 1
    assert not here
    assert "sleep 77" not in (await shell(other, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))[1]
    assert "eth" not in (await shell(other, "cat /proc/net/dev"))[1]


async def test_the_end_of_a_sandbox_is_the_end_of_all_its_processes(app, emulator):
    sandbox = await Sandbox.create.aio(app=app)
    await shell(sandbox, "setsid nohup sleep 1000 >/dev/null 2>&1 & disown -a")
    before = emulator.processes(sandbox.object_id)
    await sandbox.terminate.aio()
    assert len(before) >= 3
    assert emulator.processes(sandbox.object_id) == []


async def test_many_sandboxes_at_once(app, emulator):
    made = await asyncio.gather(*(Sandbox.create.aio(app=app, tags={"many": "1"}) for _ in range(12)))

    async def use(sandbox, number):
        assert await shell(sandbox, f"echo {number}") == (0, f"{number}\n", "")

    await asyncio.gather(*(use(sandbox, number) for number, sandbox in enumerate(made) for _ in range(3)))
    await asyncio.gather(*(sandbox.terminate.aio() for sandbox in made))
    assert emulator.alive == []
    assert len(emulator.sandboxes) == 12
