"""Tenant against tenant, and tenant against host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import uuid

from sandbox_pool.conformance.check import IS_ALIVE, check, expect, expect_equal
from sandbox_pool.conformance.context import CheckContext
from sandbox_pool.errors import SandboxLost
from sandbox_pool.spec import NetworkRules, SandboxSpec


@check("separate-users")
async def files_of_another_tenant(ctx: CheckContext) -> None:
    """A tenant cannot find, read or change another tenant's files."""
    secret = f"tenant-secret-{uuid.uuid4().hex}"
    async with ctx.two() as (one, other):
        await one.exec(f"echo {secret} > mine")
        place = (await one.exec("pwd")).output.strip()
        # The file systems of processes are looked at too: /proc/*/root and cwd lead into other slots.
        found = await other.exec(
            f"cat {place}/mine /proc/*/cwd/mine /proc/*/root{place}/mine 2>/dev/null; "
            f"grep -rs {secret} /tmp /var/tmp /dev/shm /workspace /home /root 2>/dev/null; "
            f"echo changed 2>/dev/null > {place}/mine; true",
            timeout_s=30,
        )
        after = await one.exec("cat mine")
    expect(secret not in found.output, f"the other tenant read it: {found.output!r}")
    expect_equal(after.output, f"{secret}\n", "the file")


@check("own-pids")
async def processes_of_another_tenant_are_invisible(ctx: CheckContext) -> None:
    """A tenant does not see another tenant's processes."""
    async with ctx.two() as (one, other):
        await one.exec("sleep 7391 &")
        seen = await other.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    expect("7391" not in seen.output, "the other tenant's process is visible")


@check("separate-users")
async def another_tenants_processes_cannot_be_killed(ctx: CheckContext) -> None:
    """A tenant that kills everything it can leaves the other tenant's processes and the server alone."""
    async with ctx.two() as (one, other):
        await one.exec("sleep 333 & echo $! > pid")
        await other.exec(
            "kill -9 -1; kill -9 1; for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done 2>/dev/null", timeout_s=20
        )
        alive = await one.exec(IS_ALIVE)
    expect_equal(alive.output, "alive\n", "the other tenant's process")


@check("separate-users")
async def the_environment_of_others_is_invisible(ctx: CheckContext) -> None:
    """Neither the server's environment nor another tenant's can be read, anywhere in /proc."""
    async with ctx.lease(SandboxSpec(env={"TENANT_SECRET": "s-7392"})) as one, ctx.lease() as other:
        await one.exec("sleep 300 &")
        seen = await other.exec("cat /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'; env")
    expect("s-7392" not in seen.output, "another tenant's environment is visible")
    for name in ("HERMES", "XDG_STATE_HOME", "VIRTUAL_ENV", "SSH_AUTH_SOCK", "PYTEST_CURRENT_TEST"):
        expect(f"{name}=" not in seen.output, f"{name} of the server or its client is visible")


@check()
async def the_servers_token_is_nowhere(ctx: CheckContext) -> None:
    """The bearer token is not in the environment, command lines or descriptors a slot can see."""
    async with ctx.lease() as box:
        token = box.endpoint.token
        seen = await box.exec(
            "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n'; ls -l /proc/*/fd"
        )
    expect(token not in seen.output, "the token is visible")


@check("hidden-host-files", "this-machine")
async def files_of_the_host_are_hidden(ctx: CheckContext) -> None:
    """A file of the host outside programs and libraries cannot be read, whatever its mode."""
    secret = await ctx.host_secret()
    secret.open_to_all()
    async with ctx.lease() as box:
        result = await box.exec(f"cat {secret.path} /proc/1/root{secret.path} /proc/*/root{secret.path} 2>&1")
    expect(secret.text not in result.output, "the host's file was read")


@check("own-root", "host-root")
async def password_hashes_are_hidden(ctx: CheckContext) -> None:
    """/etc/shadow and other files only root may read on the host are not there."""
    async with ctx.lease() as box:
        result = await box.exec(
            "cat /etc/shadow /etc/gshadow 2>/dev/null | wc -c; ls -A /home /root 2>/dev/null | grep -v '^/' | wc -w"
        )
    expect_equal(result.output.split()[0], "0", "bytes of password hashes")


@check("writable-root")
async def the_root_can_be_written_and_is_dropped(ctx: CheckContext) -> None:
    """A task may change the whole root file system; the next task and the host see nothing of it."""
    async with ctx.lease() as box:
        first = await box.exec(
            "echo x > /etc/hrl-mark && echo x > /usr/bin/hrl-mark && rm -f /usr/bin/env && echo done"
        )
    async with ctx.lease() as box:
        second = await box.exec(
            "ls /etc/hrl-mark /usr/bin/hrl-mark 2>/dev/null | wc -l; test -x /usr/bin/env && echo env"
        )
    expect_equal(first.output, "done\n", "output of the task that writes")
    expect_equal(second.output.split(), ["0", "env"], "what the next task sees")
    if ctx.on_this_machine:
        expect(not os.access("/etc/hrl-mark", os.F_OK), "the host's /etc was changed")


@check("own-root")
async def tmp_is_the_slots_own(ctx: CheckContext) -> None:
    """/tmp, /var/tmp and /dev/shm belong to the slot."""
    async with ctx.two() as (one, other):
        await one.exec("for d in /tmp /var/tmp /dev/shm; do echo x > $d/hrl-mark; done")
        result = await other.exec("ls /tmp /var/tmp /dev/shm | grep -c hrl-mark")
    expect_equal(result.output.strip(), "0", "marks of the other tenant")


@check("own-loopback", "python3")
async def no_network_means_none(ctx: CheckContext) -> None:
    """With network `none` a slot has loopback only, and it works."""
    async with ctx.lease(SandboxSpec(network="none")) as box:
        result = await box.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '")
        loop = await box.exec(
            "python3 -c \"import socket; s=socket.create_server(('127.0.0.1',0)); "
            "socket.create_connection(s.getsockname()); print('ok')\" || echo no python"
        )
    expect_equal(result.output.split(), ["lo"], "interfaces")
    expect(loop.output in ("ok\n", "no python\n"), f"loopback does not work: {loop.output!r}")


ASK_PROXY = (
    "exec 9<>/dev/tcp/127.0.0.1/${http_proxy##*:}; printf 'CONNECT %s HTTP/1.1\\r\\n\\r\\n' $place >&9; head -n1 <&9"
)


@check("own-loopback")
async def a_list_of_hosts_leaves_loopback_and_a_proxy(ctx: CheckContext) -> None:
    """With a list of hosts a slot has loopback only; its proxy refuses what is not listed, and it is recorded."""
    async with ctx.lease(SandboxSpec(network=NetworkRules(allow=("listed.invalid",)))) as box:
        interfaces = await box.exec("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '")
        answer = await box.exec(f"place=other.invalid:443; {ASK_PROXY}", timeout_s=20)
        asked = [(entry.host, entry.port, entry.reason) for entry in await box.network_log()]
    expect_equal(interfaces.output.split(), ["lo"], "interfaces")
    expect_equal(answer.output.strip(), "HTTP/1.1 403 Forbidden", "answer")
    expect_equal(asked, [("other.invalid", 443, "not allowed")], "recorded hosts")


@check("own-loopback")
async def egress_reaches_nothing_of_the_host(ctx: CheckContext) -> None:
    """With `egress` no address of the machine or of its private networks is reached."""
    places = "127.0.0.1 localhost [::1] 0.0.0.0 10.0.0.1 192.168.0.1 172.16.0.1 100.64.0.1 169.254.169.254 [fd00::1]"
    async with ctx.lease(SandboxSpec(network="egress")) as box:
        answers = await box.exec(f"for host in {places}; do place=$host:80; {ASK_PROXY}; done", timeout_s=60)
    expect_equal({line.strip() for line in answers.output.splitlines()}, {"HTTP/1.1 403 Forbidden"}, "answers")


@check("network-off", "this-machine")
async def services_of_the_host_cannot_be_reached(ctx: CheckContext) -> None:
    """With network `none` a TCP service of the host cannot be reached."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with ctx.lease(SandboxSpec(network="none")) as box:
            result = await box.exec(f"(echo hi > /dev/tcp/127.0.0.1/{port}) 2>/dev/null && echo reached", timeout_s=20)
    expect_equal(result.output, "", "output")


@check("own-loopback", "python3")
async def tenants_do_not_share_loopback(ctx: CheckContext) -> None:
    """Two tenants can use the same port, and neither reaches the other's."""
    serve = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 18573)); print('up', flush=True); time.sleep(60)"
    )
    async with ctx.two(SandboxSpec(network="none")) as (one, other):
        await one.write_file("serve.py", serve)
        up = await one.exec(
            "python3 serve.py > log 2>&1 & for i in $(seq 100); do grep -q up log && break; sleep 0.05; done; cat log"
        )
        result = await other.exec("(echo > /dev/tcp/127.0.0.1/18573) 2>/dev/null && echo reached", timeout_s=20)
    expect("Traceback" not in up.output, f"the first tenant could not serve: {up.output!r}")
    expect_equal(result.output, "", "output")


@check("this-machine")
async def host_network_on_request(ctx: CheckContext) -> None:
    """With network `host` a service of the host can be reached."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        async with ctx.lease(SandboxSpec(network="host")) as box:
            result = await box.exec(f"(echo hi > /dev/tcp/127.0.0.1/{port}) && echo reached", timeout_s=20)
    expect_equal(result.output, "reached\n", "output")


@check("no-abstract-sockets", "this-machine", "python3")
async def abstract_sockets_of_the_host(ctx: CheckContext) -> None:
    """An abstract unix socket of the host cannot be reached."""
    name = f"\0hrl-check-{ctx.unique_seconds()}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        script = f"import socket; s=socket.socket(socket.AF_UNIX); s.connect('\\0{name[1:]}'); print('reached')"
        async with ctx.lease(SandboxSpec(network="none")) as box:
            await box.write_file("try.py", script.encode())
            result = await box.exec("python3 try.py 2>/dev/null")
    expect_equal(result.output, "", "output")


@check("no-privileges")
async def no_mounts_and_no_new_namespaces_of_use(ctx: CheckContext) -> None:
    """A slot cannot mount, load modules, change the clock or make devices."""
    async with ctx.lease() as box:
        result = await box.exec(
            "mount -t tmpfs none /mnt 2>/dev/null && echo mounted; umount -l /proc 2>/dev/null && echo unmounted; "
            "date -s @0 >/dev/null 2>&1 && echo clock; "
            "mknod /tmp/sda b 8 0 2>/dev/null && cat /tmp/sda >/dev/null 2>&1 && echo device; "
            "echo 1 2>/dev/null > /proc/sys/kernel/panic && echo sysctl; true"
        )
    expect_equal(result.output, "", "what was possible")


@check("no-privileges", "python3")
async def no_new_privileges(ctx: CheckContext) -> None:
    """Programs with set-user-id gain nothing."""
    asking = "import ctypes; print(ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))"  # PR_GET_NO_NEW_PRIVS
    async with ctx.lease() as box:
        result = await box.exec(f"python3 -c '{asking}'; grep '^Seccomp:' /proc/self/status | tr -d '\\t '")
    expect_equal(result.output.split(), ["1", "Seccomp:2"], "no_new_privs and the filter")


@check("no-privileges", "python3")
async def other_processes_cannot_be_traced(ctx: CheckContext) -> None:
    """ptrace of the slot's own init or of the server is refused."""
    script = "import ctypes; l=ctypes.CDLL(None,use_errno=True); print([p for p in (1,2) if l.ptrace(16,p,0,0)==0])"
    async with ctx.lease() as box:
        await box.write_file("trace.py", script.encode())
        result = await box.exec("python3 trace.py 2>/dev/null || echo '[]'")
        after = await box.exec("echo fine")
    expect_equal(after.output, "fine\n", "output of the next command")
    expect(result.output.strip() in ("[]",), f"attached to {result.output.strip()}")


@check("own-host-name")
async def the_host_name_is_the_slots_own(ctx: CheckContext) -> None:
    """The host name is not the host's."""
    async with ctx.lease() as box:
        result = await box.exec("cat /proc/sys/kernel/hostname")
    expect(result.output.strip() != socket.gethostname() or not ctx.on_this_machine, "it is the host's name")


@check("own-ipc", "python3")
async def shared_memory_is_not_shared(ctx: CheckContext) -> None:
    """System V objects of one tenant are not there for another."""
    make = "import ctypes; print(ctypes.CDLL(None).shmget(0x7391, 4096, 0o1666))"
    look = "import ctypes; print(ctypes.CDLL(None).shmget(0x7391, 4096, 0))"
    async with ctx.two() as (one, other):
        made = await one.exec(f"python3 -c '{make}'")
        found = await other.exec(f"python3 -c '{look}'")
    expect(made.output.strip().isdigit() or made.exit_code, f"shmget gave {made.output!r}")
    expect_equal(
        found.output.strip(), "-1" if made.exit_code == 0 else found.output.strip(), "shmget of the other tenant"
    )


@check("own-pids")
async def proc_shows_the_slot_only(ctx: CheckContext) -> None:
    """/proc shows a handful of processes, all of the slot."""
    async with ctx.lease() as box:
        result = await box.exec("ls -d /proc/[0-9]* | wc -l; cat /proc/1/cmdline | tr '\\0' ' '")
    count = int(result.output.split()[0])
    expect(count < 20, f"{count} processes are visible")


@check("own-pids")
async def killing_pid_one_changes_nothing(ctx: CheckContext) -> None:
    """A tenant that attacks the slot's own init hurts at most itself, and the slot is usable after release."""
    async with ctx.lease() as box:
        with contextlib.suppress(SandboxLost):  # gVisor lets it kill its init, and with it itself
            await box.exec("kill -9 1; kill -STOP 1; kill -9 -1; true", timeout_s=10)
    results = await asyncio.gather(*(_say_hello(ctx) for _ in range(4)))
    expect_equal(results, ["hello\n"] * 4, "later leases")


async def _say_hello(ctx: CheckContext) -> str:
    async with ctx.lease() as box:
        return (await box.exec("echo hello")).output
