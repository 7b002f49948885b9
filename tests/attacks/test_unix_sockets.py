"""Attacks on unix sockets of the host that have a path: services of the machine, and the slot server's own."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.slot_server import Server

pytestmark = pytest.mark.asyncio(loop_scope="module")

REACH = """
import ctypes, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
path = sys.argv[1]
def tried(name, attempt):
    try:
        attempt()
    except OSError:
        return
    print("reached by", name)
def connect(to, kind=socket.SOCK_STREAM):
    s = socket.socket(socket.AF_UNIX, kind)
    s.connect(to)
def datagram(to, pair):
    make = (lambda *kind: socket.socketpair(*kind)[0]) if pair else socket.socket
    s = make(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.sendmsg([b"x"], [], 0, to)
def linked():
    os.path.lexists("link") or os.symlink(path, "link")
    connect("link")
def through_proc():
    fd = os.open(path, os.O_PATH)
    connect(f"/proc/self/fd/{fd}")
def relative():
    os.chdir("/")
    connect(path.lstrip("/"))
tried("connect", lambda: connect(path))
tried("seqpacket", lambda: connect(path + ".seq", socket.SOCK_SEQPACKET))
tried("datagram", lambda: datagram(path + ".dgram", False))
tried("datagram of a pair", lambda: datagram(path + ".dgram", True))
tried("raw", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_RAW).sendmsg([b"x"], [], 0, path + ".dgram"))
tried("link", linked)
tried("proc", through_proc)
tried("abstract", lambda: connect(b"\\0" + path.encode()))
tried("relative", relative)
print("done")
"""
RACE = """
import ctypes, os, socket, struct, sys, threading
host, own = (path.encode() for path in sys.argv[1:3])
libc = ctypes.CDLL(None, use_errno=True)
listener = socket.socket(socket.AF_UNIX); listener.bind(own); listener.listen(1000)
good, bad = (struct.pack("H", 1) + path.ljust(100, b"\\0") for path in (own, host))
memory = ctypes.create_string_buffer(good, len(good))
stop = False; sys.setswitchinterval(1e-6)
def swap():
    while not stop:
        ctypes.memmove(memory, bad, len(bad)); ctypes.memmove(memory, good, len(good))
thread = threading.Thread(target=swap); thread.start()
reached = made = 0
while made < 10:
    s = socket.socket(socket.AF_UNIX)
    if libc.connect(s.fileno(), memory, len(good)) == 0:
        made += 1
        reached += s.getpeername() != own.decode()
    s.close()
stop = True; thread.join()
print(reached)
"""
OWN = """
import socket, sys, threading
server = socket.socket(socket.AF_UNIX); server.bind("own"); server.listen(1)
clients = [socket.socket(socket.AF_UNIX) for _ in range(8)]
threads = [threading.Thread(target=s.connect, args=("own",)) for s in clients]
for t in threads: t.start()
accepted = [server.accept()[0] for _ in clients]
for t in threads: t.join()
for s in accepted: s.sendall(b"1")
print(b"".join(s.recv(1) for s in clients).decode())
a, b = socket.socketpair(); a.sendall(b"pair"); print(b.recv(9).decode())
"""
ACROSS = 'import socket; s = socket.socket(1); s.bind("b"); s.listen(9); print(s.accept()[0].recv(9))'
CLIENT = """import socket
s = socket.socket(1)
while s.connect_ex("b"): pass
s.send(b"x")"""


@pytest.fixture(scope="module")
def host_socket() -> Iterator[str]:
    """Sockets that every user of the machine may talk to; they answer nothing."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    folder.chmod(0o755)
    path = str(folder / "s")
    kinds = {"": socket.SOCK_STREAM, ".seq": socket.SOCK_SEQPACKET, ".dgram": socket.SOCK_DGRAM}
    held = [(socket.socket(socket.AF_UNIX, kind), path + end) for end, kind in kinds.items()]
    held.append((socket.socket(socket.AF_UNIX), "\0" + path))
    for one, name in held:
        one.bind(name)
        if one.type != socket.SOCK_DGRAM:
            one.listen(1000)
        if not name.startswith("\0"):
            Path(name).chmod(0o777)
    yield path
    for one, _ in held:
        one.close()
    shutil.rmtree(folder)


async def test_sockets_of_the_host_are_not_reached(server: Server, host_socket: str) -> None:
    async with server.lease() as agent:
        await agent.write_file("reach.py", REACH)
        assert (await agent.exec(f"python3 reach.py {host_socket}")).output == "done\n"


async def test_an_address_that_changes_while_it_is_looked_at_leads_nowhere_else(
    server: Server, host_socket: str
) -> None:
    async with server.lease() as agent:
        await agent.write_file("race.py", RACE)
        result = await agent.exec(f"python3 race.py {host_socket} $PWD/own", timeout_s=60)
        assert result.output == "0\n"


async def test_sockets_of_the_slot_work(server: Server) -> None:
    """What refuses everything would pass the attacks above."""
    async with server.lease() as agent:
        await agent.write_file("own.py", OWN)
        assert (await agent.exec("python3 own.py", timeout_s=20)).output == "11111111\npair\n"
        process = await agent.spawn(f"python3 -c '{ACROSS}'")
        assert (await agent.exec(f"python3 -c '{CLIENT}'", timeout_s=20)).exit_code == 0
        await process.wait()
        assert "b'x'" in (await process.log()).data
