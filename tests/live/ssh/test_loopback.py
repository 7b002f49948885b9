"""What the ssh provider promises, on a real sshd: one identity per name, a certain stop, refusals with their reason."""

import asyncio
import contextlib
import os
import signal

import pytest

from sandbox_pool import HostStartFailed, SandboxLost, SandboxSpec, SlotPool
from sandbox_pool.errors import PlaceUnreachable, SandboxError
from sandbox_pool.journal.gc import collect_orphans
from sandbox_pool.journal.journal import Journal
from sandbox_pool.journal.owner import this_process
from support.pool_clients import busy_client, kill
from support.pool_leftovers import cgroup_name, leftovers, processes
from support.pool_wait import eventually, started
from support.ssh_machines import Keys, LoopbackMachine


@contextlib.contextmanager
def one_more(keys, name, *settings, **more):
    machine = LoopbackMachine(keys, name, *settings, **more)
    try:
        yield machine
    finally:
        machine.close()


def kill_ssh(keys):
    """Kill every ssh process of this pool, as somebody who tidies up might."""
    for pid, _ in processes(keys.config, []):
        os.kill(pid, signal.SIGKILL)


async def test_a_name_is_one_host_for_every_process_and_a_stop_by_any_of_them_ends_it(place):
    first, other = place.provider(), place.provider()
    try:
        host = await first.start("hrl-x", SandboxSpec())
        again, found = await first.start("hrl-x", SandboxSpec()), await other.start("hrl-x", SandboxSpec())
        assert host.identity == again.identity == found.identity
        (record,) = await other.list()
        assert (record.name, record.owner, record.state) == ("hrl-x", this_process().tag(), "running")
        await other.stop("hrl-x")
        assert await first.list() == []
        await first.stop("hrl-x")
        await first.stop("hrl-never")
    finally:
        await first.close()
        await other.close()


async def test_the_server_is_copied_once_and_nothing_else_stays(place):
    cache = place.keys.folder / "cache-a"
    seen = []
    for _ in range(2):
        async with SlotPool.from_config(place.config()) as pool, pool.lease("t") as box:
            assert (await box.exec("echo here")).output == "here\n"
        (program,) = (path for path in cache.rglob("*") if path.is_file())
        seen.append((program.name, program.stat().st_ino))
    assert seen[0] == seen[1]


async def test_a_login_that_prints_and_a_jump_host_do_not_matter(place):
    noise = 'ForceCommand echo welcome; exec sh -c "$SSH_ORIGINAL_COMMAND"'
    with one_more(place.keys, "noisy", noise) as machine:
        place.keys.add("behind", "127.0.0.1", machine.port, f"ProxyCommand ssh -F {place.keys.config} -W %h:%p a")
        async with (
            SlotPool.from_config(place.config({"machines": ["behind"]})) as pool,
            pool.lease("t") as box,
        ):
            assert (await box.exec("echo here")).output == "here\n"


async def test_a_machine_that_known_hosts_does_not_name_is_refused(place):
    with one_more(place.keys, "stranger", known=False) as machine:
        options = {"machines": [f"ssh://127.0.0.1:{machine.port}"], "identity_file": str(place.keys.folder / "user")}
        provider = place.provider(options)
        with pytest.raises(PlaceUnreachable, match="Host key verification failed"):
            await provider.start("hrl-x", SandboxSpec())
        await provider.close()


async def test_a_key_that_is_not_accepted_is_told(place, tmp_path):
    other = Keys(tmp_path / "other")
    other.known_hosts.write_text(place.keys.known_hosts.read_text())
    other.config.write_text(place.keys.config.read_text().replace(str(place.keys.folder), str(other.folder)))
    provider = place.provider({"config": str(other.config)})
    with pytest.raises(PlaceUnreachable, match="Permission denied"):
        await provider.start("hrl-x", SandboxSpec())
    with pytest.raises(SandboxError, match="Permission denied"):
        await provider.stop("hrl-x")
    with pytest.raises(SandboxError, match="Permission denied"):
        await provider.list()
    await provider.close()


async def test_an_sshd_that_forwards_no_sockets_is_named_as_the_reason(place):
    with one_more(place.keys, "closed", "AllowStreamLocalForwarding no"):
        provider = place.provider({"machines": ["closed"]})
        with pytest.raises(HostStartFailed, match="AllowStreamLocalForwarding"):
            await provider.start("hrl-x", SandboxSpec())
        await provider.stop("hrl-x")
        await provider.close()


async def test_slots_go_by_the_cores_of_a_machine_and_to_the_one_with_room(place, keys):
    with one_more(keys, "b"):
        cores = len(os.sched_getaffinity(0))
        options = {"machines": ["gone", "a", "b"], "slots_per_core": 3 / cores, "connect_timeout_s": 2}
        keys.add("gone", "127.0.0.1", 1)
        first, second = place.provider(options), place.provider(options)
        try:
            # Both sshd lead to this machine, so they see each other's hosts: 3 slots in all.
            one = await first.start("hrl-one", SandboxSpec())
            two = await first.start("hrl-two", SandboxSpec())
            assert {one.identity.split(":")[0], two.identity.split(":")[0]} == {"a", "b"}
            with pytest.raises(PlaceUnreachable, match="all 3 slots of this machine are taken"):
                await second.start("hrl-three", SandboxSpec())
            records = {record.name for record in await second.list()}
            assert records == {"hrl-one", "hrl-two"}
        finally:
            await asyncio.gather(first.stop("hrl-one"), second.stop("hrl-two"))
            await first.close()
            await second.close()


async def test_a_connection_that_ends_is_a_lost_lease_and_a_new_host(place):
    async with SlotPool.from_config(place.config()) as pool:
        box = await pool.acquire("t")
        running = await started(box, "sleep 7777")
        kill_ssh(place.keys)
        with pytest.raises(SandboxLost):
            await running
        async with pool.lease("t2") as other:
            assert (await other.exec("echo here")).output == "here\n"
        await box.release()


async def test_what_a_killed_client_left_is_removed_by_gc(place, tmp_path):
    config = place.config({"slots_per_core": 20}, slots_per_host=20, owner_ttl_s=1000)
    client = await asyncio.to_thread(busy_client, config, tmp_path, 20)
    try:
        hosts = [path for path in place.scratch.glob("hermes-rl-*/*") if path.is_dir()]
        names = [cgroup_name(host / "scratch") for host in hosts]
        assert leftovers(place.scratch, names)["processes"]
    finally:
        kill(client)
    journal = Journal(place.state)
    report = await collect_orphans(journal, place.state, this_process())
    journal.close()
    assert [(action.done, action.name) for action in report.actions] == [("destroyed", hosts[0].name)]
    await eventually(lambda: not leftovers(place.scratch, names))
    assert list((place.state / "ssh").iterdir()) == []


async def test_the_next_pool_takes_over_what_a_killed_client_left(place, tmp_path):
    config = place.config(owner_ttl_s=1000)
    client = await asyncio.to_thread(busy_client, config, tmp_path, 2)
    try:
        (name,) = (path.name for path in place.scratch.glob("hermes-rl-*/*") if path.is_dir())
    finally:
        kill(client)
    async with SlotPool.from_config(config) as pool, pool.lease("t") as box:
        assert box.host_info.host_id == name
        assert "7777" not in (await box.exec("ps ax -o args")).output


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"machines": []}, "machines"),
        ({"machines": ["-oProxyCommand=sh"]}, "is not the name of a machine"),
        ({"machines": ["a", "a"]}, "named twice"),
        ({"machines": ["a"], "machine": "a"}, "machine"),
        ({"machines": ["a"], "check_host_keys": "no"}, "check_host_keys"),
    ],
)
def test_options_that_cannot_be_used_are_refused_by_name(place, options, reason):
    with pytest.raises(ValueError, match=reason):
        place.provider(options)
