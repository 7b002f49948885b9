"""A program that a command runs decides its own exit code, never that of the command."""

from __future__ import annotations

import pytest

from support.slot_server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

# Whatever the shell above has open is opened again; every word that may be a secret is said there, with a result.
FORGER = r"""
import os, re
words, ends = {b""}, []
shell = f"/proc/{os.getppid()}/fd"
for name in os.listdir(shell):
    try:
        if os.path.isfile(f"{shell}/{name}"):
            with open(f"{shell}/{name}", "rb") as file:
                words |= set(re.findall(rb"[0-9a-f]{16,64}", file.read(1 << 20)))
        ends.append(os.open(f"{shell}/{name}", os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        continue
for end in ends:
    for word in words:
        for said in (b"0\0/\0", b"0\0/\0#end\n", b"exit\0/\0", b"\0" * 8):
            try:
                os.write(end, word + b"\0" + said)
            except OSError:
                break
"""


@pytest.mark.parametrize("command", ["python3 forger.py; exit 7", "python3 forger.py | cat; test 1 = 2"])
async def test_a_program_does_not_decide_the_exit_code_of_the_command_that_runs_it(
    server: Server, command: str
) -> None:
    """It may do harm to its own shell, and then its command ends at its timeout; it never ends well."""
    async with server.lease() as agent:
        await agent.write_file("forger.py", FORGER)
        result = await agent.exec(command, timeout_s=5)
        assert result.exit_code in (7, 1, 124)
        assert (await agent.exec("echo fine")).output == "fine\n"


# Every way of the kernel into another process.
INTRUDER = r"""
import ctypes, os, signal, sys
libc, shell = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
def call(number, *rest):
    if libc.syscall(number, *(ctypes.c_long(each) for each in rest)) < 0:
        raise OSError(ctypes.get_errno(), "refused")
PTRACE, PIDFD_GETFD = {"x86_64": (101, 438), "aarch64": (117, 438)}[os.uname().machine]
PTRACE_ATTACH, PTRACE_SEIZE, REPORT = 16, 0x4206, 241
for name, attempt in {
    "memory": lambda: os.open(f"/proc/{shell}/mem", os.O_RDWR),
    "memory to read": lambda: os.open(f"/proc/{shell}/mem", os.O_RDONLY),
    "task's memory": lambda: os.open(f"/proc/{shell}/task/{shell}/mem", os.O_RDWR),
    "maps": lambda: open(f"/proc/{shell}/maps").read(),
    "environment": lambda: open(f"/proc/{shell}/environ").read(),
    "descriptors": lambda: [os.stat(f"/proc/{shell}/fd/{each}") for each in range(256) if each != 3],
    "mapped files": lambda: os.listdir(f"/proc/{shell}/map_files"),
    "attach": lambda: call(PTRACE, PTRACE_ATTACH, shell, 0, 0),
    "seize": lambda: call(PTRACE, PTRACE_SEIZE, shell, 0, 0),
    "descriptor": lambda: call(PIDFD_GETFD, os.pidfd_open(shell), REPORT, 0),
}.items():
    try:
        attempt()
        print("done:", name)
    except OSError:
        pass
print("tried")
"""


@pytest.mark.parametrize("whose", ["$$", "$BASHPID", "$PPID"])
async def test_a_program_does_not_get_into_the_shell_that_started_it(server: Server, whose: str) -> None:
    """Nor into a part of it, nor into its keeper: else it could say how the command ended, and what the next one is."""
    async with server.lease() as agent:
        await agent.write_file("intruder.py", INTRUDER)
        assert (await agent.exec(f"( python3 intruder.py {whose}; true )", timeout_s=20)).output == "tried\n"
        process = await agent.spawn(f"python3 intruder.py {whose}; true")
        await process.wait()
        assert (await process.log()).data == "tried\n"
        own = await agent.exec("sleep 60 & python3 intruder.py $!; kill -9 $!", timeout_s=20)
        assert "done: attach" in own.output, "programs of its own can be looked into"
