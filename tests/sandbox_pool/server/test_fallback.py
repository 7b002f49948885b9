"""Without a compiled helper the same promises hold, only slower: the Python helper at every level."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox_pool.errors import SandboxFileError
from sandbox_pool.server.fallback import confine
from sandbox_pool.spec import SandboxSpec
from support.slot_server import NOBODY, Server, running_server

pytestmark = pytest.mark.asyncio(loop_scope="module")
SYSTEM_PYTHON = shutil.which("python3", path="/usr/bin:/bin")
LEVELS = [("namespaces-root", None), ("namespaces-nouser", None), ("landlock", None), ("namespaces-rootless", NOBODY)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS, ids=lambda p: p[0])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[Server]:
    level, user = request.param
    if os.geteuid() != 0:
        pytest.skip("needs root")
    python = {} if user is None else {"python": SYSTEM_PYTHON}
    try:
        async with running_server("--level", level, user=user, compiled=False, **python) as running:  # type: ignore[arg-type]
            yield running
    except RuntimeError as error:
        pytest.skip(f"this machine cannot do it: {error}")


async def test_the_kind_of_helper_is_reported(server: Server) -> None:
    assert server.client.info.helper == "python"


async def test_state_codes_and_streams(server: Server) -> None:
    async with server.lease(SandboxSpec(files={"f": b"1"})) as sandbox:
        await sandbox.exec("export A='x y'; cd /etc; g() { echo g; }")
        result = await sandbox.exec("g; echo $A $PWD; echo e >&2; exit 4", merge_stderr=False)
        assert (result.exit_code, result.output, result.stderr, result.cwd) == (4, "g\nx y /etc\n", "e\n", "/etc")
        assert (await sandbox.exec("cat", stdin=b"in\xff")).output == "in\ufffd"
        assert (await sandbox.exec("true", cwd="/nope")).exit_code == 126
        assert (await sandbox.exec("kill -9 $$")).signal == 9


async def test_output_is_capped_with_a_log(server: Server) -> None:
    async with server.lease() as sandbox:
        result = await sandbox.exec("seq 1 5000", max_output_chars=100)
        whole = "".join(f"{i}\n" for i in range(1, 5001))
        assert result.truncation is not None
        assert result.truncation.total_chars == len(whole)
        assert result.output.startswith(whole[:40])
        assert result.output.endswith(whole[-60:])
        assert await sandbox.read_file(result.truncation.log_path) == whole.encode()


async def test_timeout_and_cancel_leave_nothing(server: Server) -> None:
    async with server.lease() as sandbox:
        result = await sandbox.exec("echo a; (setsid sleep 8881.5 &); sleep 8881.5", timeout_s=0.5)
        assert (result.exit_code, result.output) == (124, "a\n")
        call = asyncio.create_task(sandbox.exec("sleep 8881.5"))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await sandbox.exec("pgrep -f 'sleep 8881[.]5' | wc -l")).output == "0\n"


async def test_files_and_trees(server: Server, tmp_path: Path) -> None:
    (tmp_path / "src" / "d").mkdir(parents=True)
    (tmp_path / "src" / "d" / "f").write_bytes(os.urandom(700_000))
    (tmp_path / "src" / "l").symlink_to("d/f")
    (tmp_path / "src" / "d").chmod(0o555)
    async with server.lease() as sandbox:
        await sandbox.upload(tmp_path / "src", "t")
        await sandbox.download("t", tmp_path / "back")
        assert (tmp_path / "back" / "d" / "f").read_bytes() == (tmp_path / "src" / "d" / "f").read_bytes()
        assert (tmp_path / "back" / "l").readlink() == Path("d/f")
        assert (tmp_path / "back" / "d").stat().st_mode & 0o777 == 0o555
        await sandbox.write_file("a/b", b"x" * 3_000_000, mode=0o640)
        found = await sandbox.stat("a/b")
        assert found is not None
        assert (found.size, found.mode) == (3_000_000, 0o640)
        with pytest.raises(SandboxFileError):
            await sandbox.read_file("/dev/zero")
        await sandbox.exec("chmod -R u+w t")
        await sandbox.remove("t", recursive=True)
        assert [name for name, _ in await sandbox.list_dir(".")] == ["a"]


async def test_processes_and_terminals(server: Server) -> None:
    async with server.lease() as sandbox:
        process = await sandbox.spawn("read x; tty; echo got $x; exit 3", pty=True)
        await process.write("hello\n")
        assert await process.wait(20) == 3
        assert "got hello" in (await process.log()).data
        piped = await sandbox.spawn("cat")
        await piped.write("abc")
        await piped.close_stdin()
        assert await piped.wait(20) == 0
        assert (await piped.log(offset=1)).data == "bc"


async def test_forks_and_bridges(server: Server) -> None:
    async def answer(line: bytes) -> bytes:
        return line.upper()

    async with server.lease() as sandbox:
        await sandbox.exec("echo base > f")
        snapshot = await sandbox.snapshot()
        async with server.lease(snapshot=snapshot) as fork:
            assert (await fork.exec("cat f")).output == "base\n"
        path = f"{sandbox.workdir}/b.sock"
        program = f"import socket; s=socket.socket(1); s.connect('{path}'); s.send(b'hi\\n'); print(s.recv(9).decode())"
        async with sandbox.serve(path, answer):
            assert (await sandbox.exec(f'python3 -c "{program}"')).output == "HI\n\n"


async def test_it_is_confined_as_the_compiled_one_confines(server: Server) -> None:
    async with server.lease() as sandbox:
        status = (await sandbox.exec("cat /proc/self/status")).output
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status
        assert "CapBnd:\t0000000000000000" in status or "CapBnd:\t00000000800004fb" in status
        for command in ("mount -t tmpfs x /mnt", "unshare -Ur true", "cat /etc/shadow", "hostname stolen"):
            assert (await sandbox.exec(f"{command} 2>&1")).exit_code != 0


async def test_the_filter_has_no_jump_beyond_its_end() -> None:
    for allow_inet in (True, False):
        program = confine.seccomp_program(allow_inet)
        size = len(program) // 8
        for at in range(size):
            code, yes, no = (
                int.from_bytes(program[at * 8 : at * 8 + 2], "little"),
                program[at * 8 + 2],
                program[at * 8 + 3],
            )
            if code & 7 == 5:
                assert at + 1 + max(yes, no) < size
