"""The first process of a host: runs only the program that the job names, for those only who know the token."""

import asyncio
import contextlib
import hashlib
import signal
import socket
import sys

import pytest

from sandbox_pool.errors import HostStartFailed
from sandbox_pool.providers.remote_start import load_server, loader_text
from support.nomad_recorded import free_port, token_hash
from support.pool_wait import eventually

TOKEN = "the-token"
PROGRAM = b"""
import json, pathlib, sys
if "--cleanup" in sys.argv:
    (pathlib.Path(sys.argv[sys.argv.index("--scratch") + 1]).parents[1] / "cleaned").touch()
    sys.exit()
assert sys.stdin.readline() == "the-token\\n"
print(json.dumps({"error": "not a real server"}), flush=True)
sys.stdin.read()
"""


class Loader:
    def __init__(self, folder):
        self.folder = folder
        self.port = free_port()

    async def start(self, program=PROGRAM, load_s="20", **more):
        environment = {
            "HRL_BIND": "127.0.0.1",
            "HRL_PORT": str(self.port),
            "HRL_SCRATCH": str(self.folder / "scratch"),
            "HRL_SERVER_SHA256": hashlib.sha256(program).hexdigest(),
            "HRL_TOKEN_SHA256": token_hash(TOKEN),
            "HRL_LOAD_S": load_s,
            **more,
        }
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", loader_text(), env=environment, stderr=asyncio.subprocess.PIPE
        )
        return self

    async def connect(self):
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(OSError):
                    return await asyncio.open_connection("127.0.0.1", self.port)
                await asyncio.sleep(0.02)

    async def ended(self):
        async with asyncio.timeout(30):
            _, errors = await self.process.communicate()
        return self.process.returncode, errors.decode()


@pytest.fixture
async def loader(tmp_path):
    made = Loader(tmp_path)
    yield made
    if made.process.returncode is None:
        made.process.kill()
        await made.process.wait()


async def offer(loader, token, program=PROGRAM):
    reader, writer = await loader.connect()
    writer.write(f"load {token}\n".encode())
    wish = await reader.readline()
    if wish == b"need\n":
        writer.write(b"%d\n" % len(program) + program)
    with contextlib.suppress(ConnectionError):
        line = await reader.readline()
        writer.close()
        return wish, line
    return wish, b""


async def test_who_does_not_know_the_token_is_sent_away_and_the_pool_still_served(loader):
    await loader.start()
    assert await offer(loader, "another") == (b"", b"")
    assert await offer(loader, TOKEN) == (b"need\n", b'{"error": "not a real server"}\n')


async def test_who_speaks_another_language_is_sent_away_at_once(loader):
    await loader.start()
    reader, writer = await loader.connect()
    writer.write(b"\x00\x00\x00\x20 a greeting to a slot server")
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    assert await offer(loader, TOKEN) == (b"need\n", b'{"error": "not a real server"}\n')


async def test_another_program_is_not_run(loader):
    await loader.start()
    wish, line = await offer(loader, TOKEN, program=b"print('evil')")
    assert (wish, line) == (b"need\n", b"")
    code, errors = await loader.ended()
    assert code == 1
    assert "not the one that was announced" in errors


async def test_a_program_that_is_there_already_is_not_sent(loader, tmp_path):
    (tmp_path / "server.py").write_bytes(PROGRAM)
    await loader.start(HRL_SERVER_PATH=str(tmp_path / "server.py"))
    wish, line = await offer(loader, TOKEN)
    assert wish == b"have\n"
    assert b"not a real server" in line


async def test_a_pool_that_never_comes_is_not_waited_for(loader):
    await loader.start(load_s="0.5")
    code, errors = await loader.ended()
    assert code == 1
    assert "no pool connected" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_told_to_end_it_ends_the_server_and_cleans_up(loader, tmp_path, number):
    await loader.start()
    await offer(loader, TOKEN)
    loader.process.send_signal(number)
    code, _ = await loader.ended()
    assert code == 0
    assert (tmp_path / "cleaned").exists()
    assert not (tmp_path / "scratch").exists()


async def test_what_keeps_the_server_from_serving_reaches_the_pool(loader):
    await loader.start()
    with pytest.raises(HostStartFailed, match="one: not a real server"):
        await load_server("one", f"tcp:127.0.0.1:{loader.port}", TOKEN, PROGRAM)


async def test_whoever_cancels_the_loading_of_a_host_is_obeyed_at_any_moment():
    async def refuse(protocol, address):
        raise ConnectionRefusedError

    for steps in range(12):
        task = asyncio.create_task(load_server("one", "tcp:nowhere:1", TOKEN, PROGRAM, refuse))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled(), f"cancelled after {steps} steps it went on"


async def test_the_port_is_free_again_when_it_ended(loader):
    await loader.start(load_s="0.3")
    await loader.ended()

    def free():
        with socket.socket() as each:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            each.bind(("127.0.0.1", loader.port))
        return True

    await eventually(free)
