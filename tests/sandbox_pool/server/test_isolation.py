"""What a slot at full isolation cannot do: see or hurt others, exceed its limits, reach the host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest

from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.server.isolation import cgroups
from sandbox_pool.server.isolation.cgroups import Cgroups
from sandbox_pool.spec import SandboxSpec
from support.pool_wait import eventually_prints
from support.slot_server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

ESCAPES = {
    "mount": "mount -t tmpfs x /mnt",
    "bind mount": "mount --bind /etc /mnt",
    "unmount": "umount /proc",
    "user namespace": "unshare -Ur true",
    "network namespace": "unshare -n true",
    "enter a namespace": "nsenter -t 1 -m true",
    "chroot": "chroot / true",
    "host name": "hostname stolen",
    "module": "insmod /lib/x.ko || modprobe dummy",
    "clock": "date -s 2001-01-01",
    "raw device": "mknod /tmp/sda b 8 0 && head -c 1 /tmp/sda",
    "kernel memory": "head -c 1 /proc/kcore",
    "kernel settings": "echo 1 > /proc/sys/kernel/panic",
    "init's memory": "head -c 1 /proc/1/mem",
    "init's environment": "cat /proc/1/environ",
    "init's descriptors": "readlink /proc/1/fd/[0-9]* || cat /proc/1/fd/0 || : < /proc/1/fd/3",
    "kill init": "kill -9 1; sleep 0.1; ! test -d /proc/1",
    "trace init": 'python3 -c "import ctypes,sys; sys.exit(0 if ctypes.CDLL(None).ptrace(16,1,0,0)==0 else 1)"',
    "io_uring": 'python3 -c "import ctypes,sys; sys.exit(0 if ctypes.CDLL(None).syscall(425,8,0)>=0 else 1)"',
    "bpf": 'python3 -c "import ctypes,sys; sys.exit(0 if ctypes.CDLL(None).syscall(321,0,0,0)>=0 else 1)"',
    "keyring": 'python3 -c "import ctypes,sys; sys.exit(0 if ctypes.CDLL(None).syscall(250,0,-3,1)>=0 else 1)"',
    "vsock": 'python3 -c "import socket; socket.socket(40, socket.SOCK_STREAM)"',
    "clone3 with namespaces": 'python3 -c "import ctypes,sys; a=(ctypes.c_uint64*11)(0x10000000); '
    'r=ctypes.CDLL(None).syscall(435,a,88); sys.exit(0 if r>=0 else 1)"',
}


@pytest.mark.parametrize("name", ESCAPES)
async def test_a_way_out_is_closed(sandbox: Sandbox, name: str) -> None:
    assert (await sandbox.exec(ESCAPES[name])).exit_code != 0


async def test_set_user_id_programs_give_nothing(server: Server, sandbox: Sandbox) -> None:
    assert (await sandbox.exec("grep NoNewPrivs /proc/self/status")).output.split() == ["NoNewPrivs:", "1"]
    if server.client.info.variant != "rootless":  # where a slot has one user only, there is nobody to start it as
        command = "cp /bin/bash sh && chmod 4755 sh && setpriv --reuid 1000 --clear-groups ./sh -p -c 'id -u'"
        assert (await sandbox.exec(command)).output == "1000\n"


async def test_private_files_of_the_host_are_hidden(sandbox: Sandbox) -> None:
    found = await sandbox.exec("ls -A /home /root /work /mnt /srv /run 2>/dev/null; cat /etc/shadow")
    assert "No such file" in found.output
    assert not any(line and not line.endswith(":") for line in found.output.splitlines()[:-1])


async def test_tenants_see_nothing_of_each_other(server: Server) -> None:
    async with server.lease() as one, server.lease() as two:
        await one.exec("echo private > /tmp/f; sleep 7778 &")
        await eventually_prints(one, "pgrep -c sleep", "1\n")
        assert (await two.exec("ls -A /tmp; pgrep sleep; kill -9 -1 2>/dev/null; true")).exit_code in (0, 137)
        assert (await one.exec("pgrep -c sleep; cat /tmp/f")).output == "1\nprivate\n"
        names = {(await sandbox.exec("hostname")).output for sandbox in (one, two)}
        assert len(names) == 2


async def test_network_none_has_loopback_only(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert (await sandbox.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port}")).exit_code != 0
    serve = "python3 -m http.server 8123 --bind 127.0.0.1 >/dev/null 2>&1 &"
    wait = "for i in {1..100}; do exec 3<>/dev/tcp/127.0.0.1/8123 && break; sleep 0.05; done 2>/dev/null"
    inside = f"{serve} {wait}; echo connected"
    assert "connected" in (await sandbox.exec(inside)).output
    assert (await sandbox.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | xargs")).output == "lo\n"


async def test_abstract_sockets_of_the_host_are_out_of_reach(sandbox: Sandbox) -> None:
    name = f"hermes-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        program = f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')"
        assert (await sandbox.exec(f'python3 -c "{program}"')).exit_code != 0


async def test_network_host_is_the_hosts(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with server.lease(SandboxSpec(network="host")) as sandbox:
            assert (await sandbox.exec(f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo reached")).output == "reached\n"


async def test_a_memory_hog_is_stopped_and_the_slot_lives(server: Server) -> None:
    if "memory" in server.client.info.missing:
        pytest.skip("no memory cgroup here")
    async with server.lease(SandboxSpec(memory_mb=64)) as sandbox:
        result = await sandbox.exec('python3 -c "x = bytearray(400 << 20); pass"')
        assert result.exit_code == 137
        assert (await sandbox.exec("echo alive")).output == "alive\n"


async def test_a_fork_bomb_is_contained(server: Server) -> None:
    async with server.lease(SandboxSpec(pids=40)) as bombed, server.lease() as bystander:
        result = await bombed.exec("f() { f | f & }; f; sleep 1; echo survived", timeout_s=3)
        assert result.exit_code in (0, 124, 254) or result.signal
        assert (await bystander.exec("echo fine")).output == "fine\n"


async def test_a_disk_filler_gets_no_space_left(server: Server) -> None:
    async with server.lease(SandboxSpec(disk_mb=16)) as sandbox:
        result = await sandbox.exec(
            "head -c 100M /dev/zero > big; ls -s --block-size=1M big | cut -d' ' -f1; rm big; echo ok > f; cat f"
        )
        assert "No space left" in result.output
        assert result.output.endswith("ok\n")


async def test_a_log_flood_costs_only_its_own_slot(server: Server) -> None:
    async with server.lease(SandboxSpec(disk_mb=16)) as flooded:
        result = await flooded.exec("yes | head -c 60M", timeout_s=60)
        assert result.truncation is not None
        assert result.truncation.total_chars == 60 << 20
        assert len(result.output) < 51_000
        assert (await flooded.exec("echo alive")).exit_code == 0


async def test_cpu_is_limited(server: Server) -> None:
    if "cpu" in server.client.info.missing:
        pytest.skip("no cpu cgroup here")
    async with server.lease(SandboxSpec(cpu=0.2)) as sandbox:
        await sandbox.exec("timeout 1 bash -c 'while :; do :; done'")
        busy = await sandbox.exec("times | tail -1; cat /proc/self/cgroup >/dev/null")
        assert busy.exit_code == 0
        assert _cpu_quota(server, sandbox) in (20_000, None)


def _cpu_quota(server: Server, sandbox: Sandbox) -> int | None:
    """Microseconds per period in cgroup v1; None where that is not what limits here."""
    group = Cgroups(str(server.directory / "scratch")).name
    quota = Path(f"/sys/fs/cgroup/cpu/{group}/{sandbox.slot}/cpu.cfs_quota_us")
    return int(quota.read_text()) if quota.exists() else None


GVISOR = {
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    "cpu": ("cpu.cfs_quota_us", "cpu.shares"),
    "pids": ("pids.max", "pids.current"),
}
LINUX = {**GVISOR, "memory": ("memory.limit_in_bytes", "memory.oom_control"), "cpu": ("cpu.cfs_quota_us", "cpu.stat")}


@pytest.mark.parametrize(("kernel", "missing"), [(LINUX, ()), (GVISOR, ("memory", "cpu"))], ids=["linux", "gvisor"])
async def test_groups_that_take_a_limit_and_keep_none_are_not_counted_on(
    tmp_path, monkeypatch, kernel, missing
) -> None:
    groups = Cgroups(str(tmp_path))
    for controller, names in kernel.items():
        for name in names:
            file = tmp_path / controller / groups.name / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    mounts = {controller: str(tmp_path / controller) for controller in kernel}
    monkeypatch.setattr(cgroups, "_mounted", lambda kind: mounts if kind == "cgroup" else {})
    groups.setup()
    assert groups.missing == missing


async def test_a_command_that_stops_its_keeper_is_ended_with_it(server: Server, sandbox: Sandbox) -> None:
    call = asyncio.create_task(sandbox.exec("pkill -STOP slot-keeper; sleep 60"))
    async with server.lease() as other:
        assert (await other.exec("echo fine")).output == "fine\n"
    result = await call
    assert (result.exit_code, result.timed_out) == (137, False)
    assert (await sandbox.exec("pgrep sleep; echo usable", timeout_s=60)).output == "usable\n"


async def test_killing_everything_inside_is_the_commands_own_loss(sandbox: Sandbox) -> None:
    assert (await sandbox.exec("kill -9 -1")).exit_code == 137
    assert (await sandbox.exec("echo again")).output == "again\n"


async def test_many_slots_are_usable_at_once(server: Server) -> None:
    async with contextlib.AsyncExitStack() as stack:
        leases = [await stack.enter_async_context(server.lease()) for _ in range(4)]
        results = await asyncio.gather(*(sandbox.exec("echo $((6 * 7))") for sandbox in leases for _ in range(10)))
    assert {result.output for result in results} == {"42\n"}
