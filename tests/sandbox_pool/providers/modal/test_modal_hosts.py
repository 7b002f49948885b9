"""The contract of a provider, on an emulated Modal: the name is the identity, and stop says the truth."""

import asyncio
import hashlib

import pytest
from grpclib import Status

from sandbox_pool.client.host_client import HostClient
from sandbox_pool.errors import HostStartFailed, SandboxError, SandboxLost
from sandbox_pool.journal.owner import this_process
from support.modal_place import SPEC, modal_provider, nothing_left
from support.pool_wait import eventually


async def says_its_name(host):
    client = await HostClient.connect(host.address, host.token)
    name = client.info.host_id
    await client.close()
    return name


async def test_a_host_is_reached_through_a_tunnel_with_tls_and_a_token(modal, provider):
    host = await provider.start("one", SPEC)
    assert host.address.startswith("tls:")
    assert await says_its_name(host) == "one"
    with pytest.raises(SandboxError, match="token"):
        await HostClient.connect(host.address, "another")


async def test_the_same_name_is_the_same_host_and_stop_is_quiet_about_what_is_gone(modal, provider):
    first = await provider.start("one", SPEC)
    again = await provider.start("one", SPEC)
    assert (first.identity, first.address) == (again.identity, again.address)
    assert len(modal.sandboxes) == 1
    await provider.stop("one")
    await nothing_left(modal)
    await provider.stop("one")
    await provider.stop("never-started")


async def test_everything_that_runs_is_listed_with_its_owner_by_any_process(modal, provider, tmp_path):
    await provider.start("one", SPEC)
    async with modal_provider(tmp_path / "elsewhere", owner=this_process().tag()) as other:
        await other.start("two", SPEC)
        found = {(record.name, record.owner, record.state) for record in await other.list()}
        assert found == {("one", "machine_boot_ns_1_1", "running"), ("two", this_process().tag(), "running")}
        await other.stop("one")
        await other.stop("two")
        assert await provider.list() == []


async def test_an_app_that_nobody_made_has_no_hosts(modal, tmp_path):
    async with modal_provider(tmp_path, app="unheard-of") as provider:
        assert await provider.list() == []
        await provider.stop("one")


@pytest.mark.ci
async def test_more_hosts_than_one_page_are_listed(modal, provider):
    modal.limits.page_size = 2
    await asyncio.gather(*(provider.start(f"h{n}", SPEC) for n in range(5)))
    assert sorted(record.name for record in await provider.list()) == [f"h{n}" for n in range(5)]


async def test_neither_token_nor_program_can_be_read_at_modal(modal, provider):
    host = await provider.start("one", SPEC)
    (request,) = [request for rpc, request in modal.requests if rpc == "SandboxCreateV2"]
    said = str(request)
    assert host.token not in said
    assert hashlib.sha256(host.token.encode()).hexdigest() in said
    assert sum(map(len, request.definition.entrypoint_args)) < 65536


async def test_a_sandbox_that_ends_is_reported_once_with_the_reason(modal, provider):
    host = await provider.start("one", SPEC)
    await modal.preempt(host.identity)
    await eventually(lambda: provider.lost)
    assert [name for name, _ in provider.lost] == ["one"]
    assert host.identity in provider.lost[0][1]
    with pytest.raises(SandboxLost):
        await provider.start("one", SPEC)
    await provider.stop("one")


async def test_a_sandbox_that_modal_forgot_is_reported(modal, provider):
    host = await provider.start("one", SPEC)
    await modal.forget(host.identity)
    await eventually(lambda: provider.lost)
    assert host.identity in provider.lost[0][1]
    await provider.stop("one")


async def test_a_stopped_host_is_not_reported_as_lost(modal, provider):
    await provider.start("one", SPEC)
    await provider.stop("one")
    await asyncio.sleep(0.1)
    assert provider.lost == []


async def test_stop_raises_as_long_as_it_cannot_be_sure(modal, provider):
    await provider.start("one", SPEC)
    refused = modal.faults.fail("SandboxTerminate*", Status.UNAVAILABLE, times=None)
    with pytest.raises(SandboxError, match="end of one"):
        await provider.stop("one")
    modal.faults.remove(refused)
    await provider.stop("one")
    await nothing_left(modal)


async def test_an_image_without_python_fails_with_what_the_sandbox_said(modal, tmp_path):
    async with modal_provider(tmp_path, python="python-of-nowhere") as provider:
        with pytest.raises(HostStartFailed, match="python-of-nowhere"):
            await provider.start("one", SPEC)
        await provider.stop("one")


async def test_secrets_of_the_sandbox_are_not_the_slots(modal, tmp_path):
    modal.secrets["keys"] = {"API_KEY": "very-secret"}
    async with modal_provider(tmp_path, secrets="keys") as provider:
        host = await provider.start("one", SPEC)
        client = await HostClient.connect(host.address, host.token)
        sandbox = await client.lease(0, task_id="t", spec=SPEC)
        seen = await sandbox.exec("env; cat /proc/*/environ")
        await client.close()
        await provider.stop("one")
    assert "very-secret" not in seen.output + seen.stderr
    (request,) = [request for rpc, request in modal.requests if rpc == "SandboxCreateV2"]
    assert len(request.secret_sources) == 1
