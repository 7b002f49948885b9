"""A real cluster of two nodes: one is cut off, the other goes on, and nothing is left when the first returns."""

import asyncio
import os
import shutil
import subprocess
import time

import pytest

from sandbox_pool import PoolConfig, SandboxLost, SlotPool
from support.nomad_cluster import TwoNodes, ip

HEARTBEAT_LIMIT_S = 30.0
"""Far above the 2 + 2 s that the test's cluster is set to, for machines under load."""


def cannot_wire():
    if os.getuid() != 0 or shutil.which("ip") is None:
        return "needs root and the `ip` command for network namespaces"
    name = f"hrlprobe{os.getpid() % 10000}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.decode().strip()}"
    return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(cannot_wire() is not None, reason=str(cannot_wire())),
]


@pytest.fixture
def cluster():
    with TwoNodes() as nodes:
        yield nodes


@pytest.fixture
def config(cluster, tmp_path):
    acl_file = tmp_path / "nomad.acl"
    acl_file.write_text(cluster.server.pool_token())
    return PoolConfig(
        provider="nomad",
        slots_per_host=1,
        max_hosts=2,
        max_starting=1,
        state_dir=tmp_path / "state",
        # The provider must notice before the pool's own health checks would.
        health_interval_s=60.0,
        provider_options={"address": cluster.server.address, "acl_file": str(acl_file)},
    )


def node_of(cluster, box):
    return cluster.server.call("GET", f"/v1/allocation/{box.endpoint.identity}")["NodeName"]


async def lease_on_both(pool, cluster):
    boxes = await asyncio.gather(pool.acquire("a", timeout_s=60), pool.acquire("b", timeout_s=60))
    by_node = {await asyncio.to_thread(node_of, cluster, box): box for box in boxes}
    assert set(by_node) == {"node1", "node2"}
    assert by_node["node1"].endpoint.address.startswith(f"tcp:{cluster.net}.2:")
    assert by_node["node2"].endpoint.address.startswith(f"tcp:{cluster.net}.3:")
    return by_node["node1"], by_node["node2"]


async def until(condition, timeout_s):
    async with asyncio.timeout(timeout_s):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - a cluster is asked, there is no event
            await asyncio.sleep(0.2)


async def test_a_node_that_is_cut_off_costs_its_own_leases_only(cluster, config):
    async with SlotPool.from_config(config) as pool:
        near, far = await lease_on_both(pool, cluster)
        old = await asyncio.to_thread(cluster.server.call, "GET", f"/v1/allocation/{far.endpoint.identity}")
        await near.write_file("kept", b"near")
        running = asyncio.create_task(far.exec("sleep 600"))
        await asyncio.sleep(0.5)
        cluster.cut()
        began_s = time.monotonic()
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(running, HEARTBEAT_LIMIT_S)
        print(f"noticed after {time.monotonic() - began_s:.1f} s")
        await far.release()
        assert (await near.exec("cat kept")).output == "near"

        replacement = await pool.acquire("c", timeout_s=60)
        assert replacement.endpoint.name != far.endpoint.name
        assert replacement.endpoint.identity not in (far.endpoint.identity, near.endpoint.identity)
        assert await asyncio.to_thread(node_of, cluster, replacement) == "node1"
        assert (await replacement.exec("ls; echo empty")).output == "empty\n"
        allocations = await asyncio.to_thread(cluster.server.call, "GET", "/v1/allocations")
        assert [each["ID"] for each in allocations if each["JobID"] == old["JobID"]] in ([], [far.endpoint.identity])

        assert cluster.far.processes() != []
        cluster.mend()
        await until(lambda: cluster.far.processes() == [], 60)
        assert (await near.exec("cat kept")).output == "near"
        await near.release()
        await replacement.release()
    assert await asyncio.to_thread(cluster.server.children) == []
    assert cluster.server.processes() == []


async def test_a_drained_node_moves_no_host_elsewhere(cluster, config):
    async with SlotPool.from_config(config) as pool:
        near, far = await lease_on_both(pool, cluster)
        nodes = {each["Name"]: each["ID"] for each in await asyncio.to_thread(cluster.server.call, "GET", "/v1/nodes")}
        running = asyncio.create_task(far.exec("sleep 600"))
        drain = {"DrainSpec": {"Deadline": 10**9, "IgnoreSystemJobs": False}, "MarkEligible": False}
        await asyncio.to_thread(cluster.server.call, "PUT", f"/v1/node/{nodes['node2']}/drain", drain)
        with pytest.raises(SandboxLost):
            await asyncio.wait_for(running, HEARTBEAT_LIMIT_S)
        await far.release()
        replacement = await pool.acquire("c", timeout_s=60)
        assert await asyncio.to_thread(node_of, cluster, replacement) == "node1"
        assert replacement.endpoint.identity != far.endpoint.identity
        assert (await near.exec("echo on")).output == "on\n"
        await near.release()
        await replacement.release()
    assert await asyncio.to_thread(cluster.server.children) == []
