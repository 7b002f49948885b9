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
