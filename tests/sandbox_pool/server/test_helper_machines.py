"""The helper built for each kind of machine does its work, the other machine's under an emulator of its processor.

The emulator passes system calls on to this kernel but knows neither seccomp nor Landlock, so a slot is built without
them, and the seccomp filter is looked at instead of installed.
"""

from __future__ import annotations

import os
import platform
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sandbox_pool.server.build import helper_build
from sandbox_pool.server.isolation.cgroups import Cgroups
from sandbox_pool.server.isolation.levels import LEVELS, Place
from sandbox_pool.server.slots.file_worker import Worker
from sandbox_pool.server.slots.instance import Instance
from sandbox_pool.server.slots.slots import Builder
from sandbox_pool.server.slots.zygote import Zygote

PLAIN = next(level for level in LEVELS if level.name == "plain")
BUILD_S = 300
"""A cross compiler builds its C library first."""
pytestmark = pytest.mark.timeout(BUILD_S)
CROSS_BUILT = [
    pytest.param(machine, marks=[] if machine == platform.machine() else [pytest.mark.ci])
    for machine in helper_build.MACHINES
]


def runner(machine: str) -> list[str]:
    """What a program for this kind of machine is started with here."""
    if machine == platform.machine():
        return []
    emulator = shutil.which(f"qemu-{machine}-static")
    if emulator is None:
        pytest.skip(f"no qemu-{machine}-static: apt-get install qemu-user-static")
    return [emulator]


def compiler(machine: str) -> list[str]:
    commands = helper_build.compilers(machine)
    if not commands:
        pytest.skip(f"nothing here compiles for {machine}: make helpers")
    return commands[0]


@pytest.fixture(scope="module", params=helper_build.MACHINES)
def command(request: pytest.FixtureRequest) -> list[str]:
    """How the helper for one kind of machine is started."""
    started_with = runner(request.param)
    if helper_build.find_helper(request.param) is None:
        compiler(request.param)
    return [*started_with, str(helper_build.get_helper(request.param))]


@pytest_asyncio.fixture
async def slot(command: list[str], tmp_path: Path) -> AsyncIterator[Instance]:
    """A slot without isolation, made by this helper and proven gone at the end."""
    scratch = str(tmp_path)
    zygote = Zygote(command, scratch, lambda: None)
    builder = Builder(zygote, PLAIN, Place(scratch, scratch, (), 0, 0, 0), Cgroups(scratch))
    instance = await builder.build(0, {}, ())
    yield instance
    problems = await builder.destroy(instance, 0)
    zygote.close()
    assert problems == []
    assert not (tmp_path / "slots" / "0").exists()


async def run(slot: Instance, command: str, **request: Any) -> tuple[dict[str, Any], str]:
    asked = {"max_chars": 1000, **request}
    job, log = slot.start(asked, command.encode(), b"")
    reply, output = slot.finish(asked, job, log, await job.outcome())
    return reply, output.decode()


def in_slot(slot: Instance, do: str, path: str, *fields: tuple[str, Any]) -> Worker:
    return Worker(lambda values, fd: slot.control.send("file", values, fds=[fd]), [("do", do), *fields], path)


def test_other_arguments_are_refused(command: list[str]) -> None:
    assert subprocess.run([*command, "zygote"], check=False).returncode == 2


async def test_commands_have_state_code_and_output(slot: Instance) -> None:
    reply, output = await run(slot, "export A='x y'; cd /etc; echo out; exit 4")
    assert (reply["code"], reply["cwd"], output) == (4, "/etc", "out\n")
    assert (await run(slot, "echo $A $PWD"))[1] == "x y /etc\n"


async def test_a_flood_is_capped_with_exact_counts(slot: Instance) -> None:
    whole = "".join(f"{i}\n" for i in range(1, 5001))
    reply, output = await run(slot, "seq 1 5000", max_chars=100)
    assert reply["cut"]["out"]["total"] == len(whole)
    with in_slot(slot, "read", reply["cut"]["out"]["log"]) as worker:
        await worker.status()
        assert (await worker.read_all(1 << 20)).decode() == whole
    assert output.startswith(whole[:40])
    assert output.endswith(whole[-60:])


async def test_a_timeout_ends_the_command(slot: Instance) -> None:
    reply, output = await run(slot, "echo first; (setsid sleep 900 &); sleep 900", timeout_ms=1000)
    assert (reply["code"], reply["timed_out"], output) == (124, True, "first\n")


async def test_files_and_trees_pass(slot: Instance, tmp_path: Path) -> None:
    content, path = os.urandom(300_000), f"{slot.workdir}/a/b"
    with in_slot(slot, "write", path, ("size", len(content))) as worker:
        await worker.status()
        await worker.send(content)
        await worker.status()
    with in_slot(slot, "read", path) as worker:
        assert int(await worker.status()) == len(content)
        assert await worker.read_all(len(content)) == content
    with in_slot(slot, "pack", f"{slot.workdir}/a") as packed, in_slot(slot, "unpack", str(tmp_path / "t")) as unpacked:
        await packed.status()
        await unpacked.status()
        await unpacked.send(await packed.read_all(1 << 20))
        await unpacked.status()
    assert (tmp_path / "t" / "b").read_bytes() == content


DUMP = """
#include "slot.h"
#include <linux/filter.h>
#include <stdarg.h>
#include <unistd.h>
struct slot_config slot;
long show_filter(long number, ...) {
    va_list rest;
    va_start(rest, number);
    (void)va_arg(rest, int); /* operation */
    (void)va_arg(rest, int); /* flags */
    struct sock_fprog *program = va_arg(rest, struct sock_fprog *);
    va_end(rest);
    write_all(1, program->filter, program->len * sizeof *program->filter);
    return 0;
}
int main(int count, char **arguments) {
    int listener;
    (void)arguments;
    return install_seccomp(count == 1, count == 3 ? &listener : NULL) != NULL;
}
"""
ALLOW, ASK, EPERM, EAFNOSUPPORT, ENOSYS = 0x7FFF0000, 0x7FC00000, 0x50001, 0x50061, 0x50026
ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# From the kernel's tables, so that a number of another machine's table is found out.
NUMBERS = {
    "x86_64": {
        "read": 0, "socket": 41, "clone": 56, "execve": 59, "mount": 165, "umount2": 166, "pivot_root": 155,
        "chroot": 161, "unshare": 272, "setns": 308, "bpf": 321, "kexec_file_load": 320, "init_module": 175,
        "io_uring_setup": 425, "mount_setattr": 442, "clone3": 435, "process_vm_readv": 310, "keyctl": 250,
        "socketpair": 53, "connect": 42,
    },
    "aarch64": {
        "read": 63, "socket": 198, "clone": 220, "execve": 221, "mount": 40, "umount2": 39, "pivot_root": 41,
        "chroot": 51, "unshare": 97, "setns": 268, "bpf": 280, "kexec_file_load": 294, "init_module": 105,
        "io_uring_setup": 425, "mount_setattr": 442, "clone3": 435, "process_vm_readv": 270, "keyctl": 219,
        "socketpair": 199, "connect": 203,
    },
}  # fmt: skip
AF_UNIX, AF_INET, AF_VSOCK = 1, 2, 40
CLONE_NEWUSER, SIGCHLD = 0x10000000, 17


def verdict(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """What the kernel would answer: it runs this program over the call's number, machine and arguments."""
    data = struct.pack("<iIQQQ", number, arch, 0, *(*arguments, 0, 0)[:2])
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at, value = 0, 0
    while True:
        op, yes, no, k = code[at]
        if op == 0x06:
            return k
        if op == 0x20:
            (value,) = struct.unpack_from("<I", data, k)
        elif op == 0x05:
            at += k
        elif op == 0x54:
            value &= k
        else:
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[op]
            at += yes if holds else no
        at += 1


@pytest.fixture(scope="module", params=CROSS_BUILT)
def machine_and_dump(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    """A program that writes the filter of one kind of machine to its stdout."""
    machine: str = request.param
    folder, sources = tmp_path_factory.mktemp("dump"), helper_build.SOURCES
    started_with = runner(machine)
    (folder / "dump.c").write_text(DUMP)
    inputs = [str(folder / "dump.c"), str(sources / "seccomp.c"), str(sources / "util.c")]
    options = ["-Dsyscall=show_filter", f"-I{sources}", "-o", str(folder / "dump")]
    subprocess.run([*compiler(machine), *helper_build.FLAGS, *options, *inputs], check=True, capture_output=True)
    return machine, [*started_with, str(folder / "dump")]


def test_the_filter_refuses_by_the_numbers_of_its_machine(machine_and_dump: tuple[str, list[str]]) -> None:
    machine, dump = machine_and_dump
    arch, numbers = ARCH[machine], dict(NUMBERS[machine])
    program = subprocess.run(dump, capture_output=True, check=True).stdout
    clone, socket, clone3 = numbers.pop("clone"), numbers.pop("socket"), numbers.pop("clone3")
    allowed = {"read", "execve", "socketpair", "connect"}
    for name, number in numbers.items():
        assert verdict(program, arch, number) == (ALLOW if name in allowed else EPERM), name
    assert verdict(program, arch, clone, SIGCHLD) == ALLOW
    assert verdict(program, arch, clone, CLONE_NEWUSER | SIGCHLD) == EPERM
    assert verdict(program, arch, clone3) == ENOSYS
    assert [verdict(program, arch, socket, family) for family in (AF_UNIX, AF_INET, AF_VSOCK)] == [
        ALLOW, ALLOW, EAFNOSUPPORT,
    ]  # fmt: skip
    other = next(value for value in ARCH.values() if value != arch)
    assert verdict(program, other, numbers["read"]) == ENOSYS


STREAM, DATAGRAM, RAW, PACKETS, CLOEXEC = 1, 2, 3, 5, 0o2000000


def test_the_filter_can_refuse_the_internet(machine_and_dump: tuple[str, list[str]]) -> None:
    """Then it leaves unix sockets that must be connected, and asks about connections where somebody listens."""
    machine, dump = machine_and_dump
    arch, numbers = ARCH[machine], NUMBERS[machine]
    for listener, answer in (([], EPERM), (["ask"], ASK)):
        program = subprocess.run([*dump, "no-internet", *listener], capture_output=True, check=True).stdout
        assert verdict(program, arch, numbers["connect"]) == answer
        for call in (numbers["socket"], numbers["socketpair"]):
            kinds = (STREAM, STREAM | CLOEXEC, PACKETS, DATAGRAM, DATAGRAM | CLOEXEC, RAW)
            given = [verdict(program, arch, call, AF_UNIX, kind) for kind in kinds]
            assert given == [ALLOW] * 3 + [EAFNOSUPPORT] * 3
            assert verdict(program, arch, call, AF_INET, STREAM) == EAFNOSUPPORT
        assert verdict(program, arch, numbers["read"]) == ALLOW
