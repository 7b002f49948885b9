"""Every isolation level this machine can produce does the same work, and says what it cannot enforce."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox_pool.spec import SandboxSpec
from support.slot_server import NOBODY, Server, running_server, server_at_level

pytestmark = pytest.mark.asyncio(loop_scope="module")

DAEMON = f"sleep 7777.{os.getpid()}"
"""No other run of these tests on this machine has one of this name: some levels see all processes."""
DAEMON_PATTERN = DAEMON.replace(".", "[.]")

LEVELS = {
    True: [
        ("namespaces-root", None),
        ("namespaces-nouser", None),
        ("landlock", None),
        ("uid", None),
        ("plain", None),
        ("namespaces-rootless", NOBODY),
        ("landlock", NOBODY),
    ],
    False: [("namespaces-rootless", None), ("landlock", None), ("plain", None)],
}[os.geteuid() == 0]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS, ids=lambda p: f"{p[0]}-as-{p[1] or 'us'}")
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    async with server_at_level(*request.param) as running:
        yield running


def is_namespaces(server: Server) -> bool:
    return server.client.info.isolation == "namespaces"


async def test_the_level_is_reported(server: Server) -> None:
    info = server.client.info
    assert server.ready["isolation"] == info.isolation
    assert info.isolation in info.isolation_reason
    assert ("disk" in info.missing) == (not is_namespaces(server))


async def test_commands_files_and_state_work(server: Server) -> None:
    async with server.lease(SandboxSpec(files={"a": b"content"})) as sandbox:
        assert (await sandbox.exec("cat a; pwd")).output == f"content{sandbox.workdir}\n"
        await sandbox.exec("export A=1; f() { echo f; }; mkdir d; cd d")
        assert (await sandbox.exec("f; echo $A $PWD")).output == f"f\n1 {sandbox.workdir}/d\n"
        await sandbox.write_file("/workspace/x/y", b"1")
        assert await sandbox.read_file("x/y") == b"1"
        assert (await sandbox.exec("exec 3< <(seq 30000); cat <&3", max_output_chars=100)).truncation is not None


async def test_timeout_leaves_nothing_of_the_command(server: Server) -> None:
    async with server.lease() as sandbox:
        result = await sandbox.exec(f"(setsid {DAEMON} &); {DAEMON}", timeout_s=0.4)
        assert result.exit_code == 124
        assert (await sandbox.exec(f"pgrep -f '{DAEMON_PATTERN}' | wc -l")).output == "0\n"


async def test_terminals_work(server: Server) -> None:
    async with server.lease() as sandbox:
        process = await sandbox.spawn("tty && echo done", pty=True)
        assert await process.wait(20) == 0
        assert "/dev/pts/" in (await process.log()).data


async def test_a_fork_has_the_files_of_its_origin(server: Server) -> None:
    async with server.lease() as sandbox:
        await sandbox.exec("mkdir d; echo base > d/f; echo 0 > zero; cd d; export A=1")
        snapshot = await sandbox.snapshot(keep_state=True)
        await sandbox.exec("echo changed > f")
        async with server.lease(snapshot=snapshot) as fork:
            assert (await fork.exec("cat f; echo $A; pwd")).output == f"base\n1\n{fork.workdir}/d\n"
            await fork.exec("echo 1 > ../one")
            deeper = await fork.snapshot(keep_state=True)
            async with server.lease(snapshot=deeper) as second:
                assert (await second.exec("cat ../zero ../one f")).output == "0\n1\nbase\n"
        await server.client.drop_snapshot(snapshot)


async def test_a_reset_leaves_no_file_and_no_process(server: Server) -> None:
    async with server.lease() as sandbox:
        slot = sandbox.slot
        await sandbox.exec(f"echo x > f; echo x > ~/g; setsid {DAEMON} >/dev/null 2>&1 & disown")
    following = await server.client.lease(slot, task_id="next", spec=SandboxSpec())
    assert (await following.exec(f"ls -A . ~; pgrep -f '{DAEMON_PATTERN}'")).output.split() == [
        ".:",
        f"{await home(following)}:",
    ]
    assert (await server.client.release(slot, following.epoch)).clean


LEAVE_SHARED = """
import ctypes, os
libc = ctypes.CDLL(None)
made = [libc.shmget(0, 4096, 0o1666), libc.semget(0, 1, 0o1666), libc.msgget(0, 0o1666)]
open("/dev/shm/left-%d" % os.getpid(), "w").write("private")
print(min(made) >= 0)
"""


async def test_semaphores_and_locks_of_python_work(server: Server) -> None:
    if "signals" in server.client.info.missing:
        pytest.skip("slots that are one user would share them")
    async with server.lease() as sandbox:
        asked = await sandbox.exec(
            "python3 -c 'import multiprocessing as m; print(m.Lock(), m.Semaphore(3).acquire())'"
        )
        assert asked.output == "<Lock(owner=None)> True\n"


async def test_a_reset_leaves_no_shared_memory(server: Server) -> None:
    info = server.client.info
    if info.isolation == "plain" or "signals" in info.missing:
        pytest.skip("slots are not users of their own, and have no namespace either")
    async with server.lease() as sandbox:
        slot = sandbox.slot
        await sandbox.write_file("leave.py", LEAVE_SHARED.encode())
        assert (await sandbox.exec("python3 leave.py")).output == "True\n"
        owner = (await sandbox.exec("id -u")).output.strip()
    following = await server.client.lease(slot, task_id="next", spec=SandboxSpec())
    tables = (await following.exec("cat /proc/sysvipc/shm /proc/sysvipc/sem /proc/sysvipc/msg")).output
    left = [line for line in tables.splitlines() if owner != "0" and owner in line.split()]
    assert left == []
    if info.isolation == "namespaces":
        assert len(tables.splitlines()) == 3, "only the headings of a namespace of its own"
        assert (await following.exec("ls /dev/shm")).output == ""
    else:
        assert [entry.name for entry in os.scandir("/dev/shm") if str(entry.stat().st_uid) == owner] == []
    assert (await server.client.release(slot, following.epoch)).clean


async def home(sandbox: object) -> str:
    return (await sandbox.exec("echo ~")).output.strip()  # type: ignore[attr-defined]


async def test_the_servers_environment_is_invisible(server: Server) -> None:
    async with server.lease() as sandbox:
        found = await sandbox.exec(
            "export shown=yes; { env; cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; }"
            " | grep -e shown= -e secret-of-the-server"
        )
        visible_anyway = server.client.info.isolation == "plain"
        assert found.output.count("shown=") > 1, "the search finds what there is, in /proc too"
        assert visible_anyway or "secret-of-the-server" not in found.output


async def test_another_tenant_is_out_of_reach(server: Server) -> None:
    if server.client.info.isolation == "plain":
        pytest.skip("plain promises no isolation")
    async with server.lease() as victim, server.lease() as other:
        await victim.exec("echo private > secret; chmod 644 secret")
        process = await victim.spawn(DAEMON)
        path = f"{victim.workdir}/secret"
        seen = await other.exec(f"cat {path} /proc/*/cwd/secret 2>/dev/null; pkill -9 -f '{DAEMON_PATTERN}'; true")
        assert "private" not in seen.output
        assert await process.poll() is None


async def test_nobody_gains_privileges(server: Server) -> None:
    if server.client.info.isolation == "plain":
        pytest.skip("plain promises no isolation")
    async with server.lease() as sandbox:
        status = (await sandbox.exec("cat /proc/self/status")).output
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
        assert (await sandbox.exec("unshare -Ur true 2>&1")).exit_code != 0
        assert (await sandbox.exec("mount -t tmpfs x /mnt 2>&1")).exit_code != 0


async def test_min_isolation_refuses_what_is_weaker(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="IsolationUnavailable"):
        async with running_server("--level", "plain", "--min-isolation", "namespaces"):
            pass


async def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(RuntimeError, match="unknown isolation level"):
        async with running_server("--level", "magic"):
            pass
