"""Hosts on Nomad, as the provider's contract has them, against answers recorded from a live agent."""

import asyncio

import pytest

from sandbox_pool import HostStartFailed, PoolConfig, SandboxLost, SlotPool
from sandbox_pool.client.host_client import HostClient
from sandbox_pool.errors import SandboxError
from sandbox_pool.providers.nomad.nomad_api import NomadApi, NomadError
from sandbox_pool.providers.nomad.nomad_options import NomadOptions
from sandbox_pool.spec import SandboxSpec
from support.pool_wait import eventually

SPEC = SandboxSpec()


async def test_a_pool_runs_commands_in_slots_on_nomad(nomad, tmp_path):
    config = PoolConfig(
        provider="nomad",
        slots_per_host=2,
        max_hosts=1,
        state_dir=tmp_path / "state",
        provider_options={"address": nomad.address},
    )
    async with SlotPool.from_config(config) as pool:
        async with pool.lease("t") as box:
            assert (await box.exec("echo hello")).output == "hello\n"
        assert len(nomad.children) == 1
    assert (nomad.children, nomad.jobs, nomad.allocations) == ({}, {}, {})


async def test_the_same_name_is_the_same_host(nomad, make_provider):
    provider = make_provider()
    first = await provider.start("one", SPEC)
    again = await provider.start("one", SPEC)
    elsewhere = await make_provider().start("one", SPEC)
    assert first == again == elsewhere
    assert nomad.count("PUT", "/dispatch") == 1


async def test_the_server_knows_its_name_and_takes_only_its_token(make_provider):
    host = await make_provider().start("one", SPEC)
    client = await HostClient.connect(host.address, host.token)
    assert client.info.host_id == "one"
    await client.close()
    with pytest.raises(SandboxError):
        await HostClient.connect(host.address, "another")


async def test_a_lost_answer_to_a_dispatch_is_asked_again_not_doubled(nomad, make_provider):
    nomad.lose = ["/dispatch", "/dispatch"]
    await make_provider().start("one", SPEC)
    assert nomad.count("PUT", "/dispatch") >= 3
    assert len(nomad.children) == 1


async def test_stop_settles_a_dispatch_that_was_never_answered(nomad, make_provider):
    provider = make_provider(api_timeout_s=0.3)
    nomad.lose = ["/dispatch"] * 50
    with pytest.raises(HostStartFailed, match="does not answer"):
        await provider.start("one", SPEC)
    nomad.lose = []
    nomad.children.clear()  # as if the request had reached the cluster only now
    await provider.stop("one")
    assert nomad.children == {}


async def test_stop_ends_the_task_before_it_forgets_the_job(nomad, make_provider):
    provider = make_provider(stop_timeout_s=0.5)
    await provider.start("one", SPEC)
    nomad.stuck = True
    with pytest.raises(SandboxError, match="still running"):
        await provider.stop("one")
    assert len(nomad.children) == 1
    nomad.stuck = False
    await provider.stop("one")
    assert nomad.children == {}
    await provider.stop("one")
    await provider.stop("never existed")


async def test_a_node_that_is_cut_off_does_not_hold_up_a_stop(nomad, make_provider):
    provider = make_provider()
    host = await provider.start("one", SPEC)
    nomad.stuck = True
    nomad.change(host.identity, client="unknown")
    await provider.stop("one")
    assert nomad.children == {}


@pytest.mark.parametrize("status", ["lost", "unknown", "failed", "complete"])
@pytest.mark.parametrize("heard", ["by event", "by list"])
async def test_an_allocation_that_is_gone_is_a_lost_host(nomad, make_provider, status, heard):
    provider = make_provider()
    host = await provider.start("one", SPEC)
    nomad.silent = heard == "by list"
    nomad.change(host.identity, client=status)
    await eventually(lambda: provider.lost)
    ((name, reason),) = provider.lost
    assert name == "one"
    assert status in reason


async def test_a_host_told_to_stop_is_lost_before_it_ended(nomad, make_provider):
    provider = make_provider()
    host = await provider.start("one", SPEC)
    nomad.change(host.identity, desired="evict")
    await eventually(lambda: provider.lost)
    assert "told to evict" in provider.lost[0][1]


async def test_a_replacement_is_never_taken_for_the_host(nomad, make_provider):
    provider = make_provider()
    await provider.start("one", SPEC)
    (child,) = nomad.children
    await nomad.place(child)
    await eventually(lambda: provider.lost)
    assert "in the place of" in provider.lost[0][1]
    with pytest.raises(SandboxLost):
        await provider.start("one", SPEC)


async def test_an_allocation_the_cluster_forgot_is_a_lost_host(nomad, make_provider):
    provider = make_provider()
    host = await provider.start("one", SPEC)
    forgotten = nomad.allocations.pop(host.identity)
    await eventually(lambda: provider.lost)
    nomad.allocations[host.identity] = forgotten


async def test_events_are_followed_again_after_the_stream_broke(nomad, make_provider):
    provider = make_provider(relist_s=60.0)
    host = await provider.start("one", SPEC)
    nomad.cut_streams()
    nomad.change(host.identity, client="lost")
    await eventually(lambda: provider.lost)


async def test_a_host_that_was_stopped_is_not_reported_lost(nomad, make_provider):
    provider = make_provider()
    await provider.start("one", SPEC)
    await provider.stop("one")
    await asyncio.sleep(0.7)
    assert provider.lost == []


async def test_no_room_names_the_resource(nomad, make_provider):
    nomad.full = True
    with pytest.raises(HostStartFailed, match="memory is exhausted on 1 node"):
        await make_provider(blocked_timeout_s=0.2).start("one", SPEC)


async def test_a_task_that_dies_before_it_serves_is_a_failed_start(nomad, make_provider):
    with pytest.raises(HostStartFailed, match="no-such-level"):
        await make_provider(level="no-such-level", ready_timeout_s=20.0).start("one", SPEC)


async def test_a_removed_job_is_registered_again(nomad, make_provider):
    provider = make_provider()
    await provider.start("one", SPEC)
    nomad.jobs.clear()
    await provider.start("two", SPEC)
    assert len(nomad.children) == 2


async def test_a_cluster_without_a_leader_is_waited_for(nomad, make_provider):
    nomad.leaderless = 3
    await make_provider().start("one", SPEC)


async def test_a_refused_token_is_named_at_once(nomad, make_provider):
    nomad.tokens = {"good"}
    provider = make_provider(token="old")
    with pytest.raises(HostStartFailed, match=r"403.*ACL token"):
        await provider.start("one", SPEC)
    assert nomad.count("GET", "/v1/jobs") == 1


async def test_a_token_file_is_read_anew(nomad, make_provider, tmp_path):
    nomad.tokens = {"good"}
    (tmp_path / "acl").write_text("old\n")
    provider = make_provider(acl_file=tmp_path / "acl")
    with pytest.raises(NomadError):
        await provider.list()
    (tmp_path / "acl").write_text("good\n")
    assert await provider.list() == []


async def test_list_shows_every_host_with_its_owner(nomad, make_provider):
    await make_provider(owner="a_b_c_1_1").start("one", SPEC)
    nomad.full = True
    with pytest.raises(HostStartFailed):
        await make_provider(owner="a_b_c_2_2", blocked_timeout_s=0.1).start("two", SPEC)
    records = {record.name: record for record in await make_provider().list()}
    assert (records["one"].owner, records["one"].state) == ("a_b_c_1_1", "running")
    assert (records["two"].owner, records["two"].state) == ("a_b_c_2_2", "starting")
    assert records["one"].created_s > 1.7e9


async def test_the_job_stays_while_another_pool_has_hosts_of_it(nomad, make_provider):
    one, other = make_provider(), make_provider()
    await one.start("one", SPEC)
    await other.start("other", SPEC)
    await one.stop("one")
    await one.close()
    assert len(nomad.jobs) == 1
    await other.stop("other")
    await other.close()
    assert nomad.jobs == {}


async def test_a_job_without_its_envelope_is_refused_as_nomad_does(nomad):
    api = NomadApi(NomadOptions(address=nomad.address))
    with pytest.raises(NomadError, match="Job must be specified"):
        await api._call("PUT", "/v1/jobs", body={"ID": "x"})
    await api.close()


async def test_nomad_that_cannot_be_reached_is_named():
    api = NomadApi(NomadOptions(address="http://127.0.0.1:1", api_timeout_s=0.2))
    with pytest.raises(NomadError, match=r"http://127.0.0.1:1 does not answer"):
        await api.jobs("x")
    await api.close()
