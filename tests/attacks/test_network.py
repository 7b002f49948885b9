"""Attacks on a slot's list of hosts: ways to anything that is not on it. Nothing of the host may ever hear of one."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sandbox_pool.client.sandbox import Sandbox
from sandbox_pool.spec import NetworkRules, SandboxSpec
from support.slot_server import NOBODY, Server, running_server
from support.small_internet import (
    DNS,
    HOST,
    HOST6,
    OTHER,
    PRIVATE,
    SITE,
    SITE6,
    SmallInternet,
    missing,
    small_internet,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl"),
]

LEVELS = [("namespaces-root", None), ("namespaces-rootless", NOBODY), ("namespaces-nouser", None)]
NOT_PUBLIC = ["loop", "loop6", "mapped", "private", "self", "self6", "metadata", "zero"]
SPEC = SandboxSpec(
    network=NetworkRules(
        allow=(
            "site.example",
            "six.example",
            "*.down.site.example",
            "rebind.example",
            "mixed.example",
            *(f"{name}.example" for name in NOT_PUBLIC),
        )
    )
)
EGRESS = SandboxSpec(network="egress")
PROXY = "127.0.0.1 31280"


@pytest.fixture(scope="module")
def net() -> Iterator[SmallInternet]:
    with small_internet() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEVELS, ids=lambda level: level[0])
async def server(request: pytest.FixtureRequest, net: SmallInternet) -> AsyncIterator[Server]:
    level, user = request.param
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("no Python that an ordinary user may run")
    try:
        async with running_server("--level", level, user=user, prefix=net.prefix(user), python=python) as running:
            yield running
    except RuntimeError as error:
        pytest.skip(f"this machine cannot do it: {error}")


@pytest_asyncio.fixture(loop_scope="module")
async def slot(server: Server, net: SmallInternet) -> AsyncIterator[Sandbox]:
    before = len(net.asked())
    async with server.lease(SPEC) as leased:
        yield leased
    hosts = {tuple(line.split()[:2]) for line in net.asked()[before:]}
    assert not [(side, host) for side, host in hosts if side == "inside" or host in ("other.example", OTHER)]


async def say(slot: Sandbox, request: str) -> str:
    """Bytes to the proxy, as a program that knows it would send them; what it answers."""
    quoted = request.replace("\n", "\\r\\n")
    program = f"exec 9<>/dev/tcp/{PROXY.replace(' ', '/')}; printf '{quoted}' >&9; timeout 5 cat <&9"
    return (await slot.exec(program, timeout_s=20)).output


async def refused(slot: Sandbox) -> set[tuple[str, str]]:
    return {(entry.host, entry.reason) for entry in await slot.network_log() if not entry.allowed}


@pytest.mark.parametrize(
    "way",
    [
        f"timeout 3 bash -c 'echo >/dev/tcp/{SITE}/80'",
        f"timeout 3 bash -c 'echo >/dev/tcp/{HOST}/80'",
        f"timeout 3 bash -c 'echo >/dev/tcp/{PRIVATE}/80'",
        f"curl -sS --noproxy '*' --max-time 3 http://{SITE}/",
        f"curl -sS -6 --noproxy '*' --max-time 3 'http://[{SITE6}]/'",
        f"timeout 3 bash -c 'echo -n x >/dev/udp/{DNS}/53'",
        "curl -sS --noproxy '*' --max-time 3 http://site.example/",
    ],
    ids=["tcp", "the host", "its private network", "without the proxy", "ipv6", "udp to a name server", "own dns"],
)
async def test_nothing_is_reached_but_through_the_proxy(slot: Sandbox, way: str) -> None:
    result = await slot.exec(way, timeout_s=20)
    assert result.exit_code != 0, result.output


async def test_raw_and_packet_sockets_are_refused(slot: Sandbox) -> None:
    tries = "AF_INET,SOCK_RAW,1 AF_INET,SOCK_RAW,255 AF_INET6,SOCK_RAW,58 AF_PACKET,SOCK_RAW,768 AF_VSOCK,SOCK_STREAM,0"
    program = (
        "import socket\nfor text in '" + tries + "'.split():\n"
        " family, kind, number = text.split(',')\n"
        " try: socket.socket(getattr(socket, family), getattr(socket, kind), int(number)); print('MADE', text)\n"
        " except OSError: pass\n"
    )
    await slot.write_file("raw.py", program)
    assert (await slot.exec("python3 raw.py")).output == ""


async def test_a_redirect_asks_the_list_again(slot: Sandbox) -> None:
    for url in ("http://other.example/", "http://loop.example/", f"http://{PRIVATE}/", "http://127.0.0.1:8080/"):
        result = await slot.exec(f"curl -sSL --noproxy '' --max-time 5 'http://site.example/to?{url}'", timeout_s=20)
        assert "INSIDE" not in result.output
        assert "public other" not in result.output
    assert {
        ("other.example", "not allowed"),
        ("loop.example", "not public"),
        (PRIVATE, "not allowed"),
    } <= await refused(slot)


ADDRESSES = (SITE, OTHER, HOST, PRIVATE, "127.0.0.1", "127.1", "0x7f000001", "2130706433", "0.0.0.0", "169.254.169.254")
ADDRESSES6 = (SITE6, HOST6, "::1", "::", "::ffff:127.0.0.1", "64:ff9b::7f00:1")


@pytest.mark.parametrize("host", [*ADDRESSES, *(f"[{address}]" for address in ADDRESSES6), "localhost"])
async def test_connect_to_an_address_is_not_on_the_list(slot: Sandbox, host: str) -> None:
    answer = await say(slot, f"CONNECT {host}:80 HTTP/1.1\n\nGET / HTTP/1.0\n\n")
    assert answer.startswith("HTTP/1.1 403"), answer


@pytest.mark.parametrize("name", NOT_PUBLIC)
async def test_a_listed_name_does_not_lead_into_the_host(slot: Sandbox, name: str) -> None:
    for request in (f"CONNECT {name}.example:80 HTTP/1.1", f"GET http://{name}.example/ HTTP/1.1"):
        assert (await say(slot, f"{request}\n\n")).startswith("HTTP/1.1 403")
    assert await refused(slot) == {(f"{name}.example", "not public")}


async def test_a_name_that_changes_its_address_is_connected_where_it_was_checked(slot: Sandbox) -> None:
    answers = [await say(slot, "GET http://rebind.example/ HTTP/1.1\n\n") for _ in range(6)]
    assert sum("public rebind.example" in answer for answer in answers) == 3
    assert sum(answer.startswith("HTTP/1.1 403") for answer in answers) == 3


async def test_of_several_addresses_only_the_public_one_is_used(slot: Sandbox) -> None:
    for _ in range(3):
        assert "public mixed.example" in await say(slot, "GET http://mixed.example/ HTTP/1.1\n\n")


@pytest.mark.parametrize(
    "url",
    [
        "http://site.example:8080/",
        "http://sub.site.example/",
        "http://down.site.example/",
        "http://site.example.evil/",
        "http://evilsite.example/",
        "http://site.example@other.example/",
        "http://other.example#@site.example/",
        "http://other.example\\@site.example/",
        "http://site.example%2eother.example/",
        "http://site.example%00.other.example/",
        "http://site.example..other.example/",
        "http://SITE.example.:8080/",
        "http://0177.0.0.1/",
        "http://0x7f.0.0.1/",
        "http://127.0.0.1.:80/",
        "http://[::ffff:7f00:1]/",
        "http://[::127.0.0.1]/",
        "http://[fe80::1%%25eth0]/",
        "http://localhost./",
        "http://LOCALHOST/",
        "https://site.example/",
        "ftp://site.example/",
        "/",
    ],
)
async def test_a_url_means_the_host_that_is_checked(slot: Sandbox, url: str) -> None:
    answer = await say(slot, f"GET {url.replace('%', '%%')} HTTP/1.1\nHost: site.example\n\n")
    assert answer.startswith(("HTTP/1.1 403", "HTTP/1.1 400")), answer


async def test_the_host_header_and_further_requests_reach_no_other_site(slot: Sandbox) -> None:
    second = "GET / HTTP/1.1\nHost: other.example\n\n"
    for first in (
        "GET http://site.example/ HTTP/1.1\nHost: other.example\n\n",
        f"GET http://site.example/ HTTP/1.1\nConnection: keep-alive\n\n{second}",
        f"POST http://site.example/ HTTP/1.1\nContent-Length: 2\n\nab{second}",
        f"POST http://site.example/ HTTP/1.1\nTransfer-Encoding: chunked\n\n2\nab\n0\n\n{second}",
        f"POST http://site.example/ HTTP/1.1\nContent-Length: 4\nTransfer-Encoding: chunked\n\n0\n\n{second}",
        f"POST http://site.example/ HTTP/1.1\nContent-Length: 0\nContent-Length: 60\n\n{second}",
        f"GET http://site.example/ HTTP/1.1\nX: y\\n{second}",
        f"GET http://site.example/ HTTP/1.1\nConnection: content-length\nContent-Length: 80\n\n{second}",
    ):
        assert "other.example" not in await say(slot, first)


@pytest.mark.parametrize(
    "request_in_it",
    [
        "GET / HTTP/1.1\nHost: other.example\n\n",
        "\nGET / HTTP/1.1\nHost: other.example\n\n",
        "GET http://other.example/ HTTP/1.1\nHost: site.example\n\n",
        "GET / HTTP/1.1\nHost: site.example\nHost: other.example\n\n",
        "GET / HTTP/1.1\\nHost: other.example\\n\\n",
        "GET / HTTP/1.1\nHost: site.example\n\nGET / HTTP/1.1\nHost: other.example\n\n",
        "POST / HTTP/1.1\nHost: site.example\nContent-Length: 1\n\nxGET / HTTP/1.1\nHost: other.example\n\n",
        "get / HTTP/1.1\nHost: other.example\n\n",
        "PRI * HTTP/2.0\n\nSM\n\n",
        "\\014GET / HTTP/1.1\nHost: other.example\n\n",
        "\\205GET / HTTP/1.1\nHost: other.example\n\n",
        "GET\\034/\\034HTTP/1.1\nHost: other.example\n\n",
        "GET / HTTP/1.1\nHost: site.example\nConnection: Upgrade\n\nGET / HTTP/1.1\nHost: other.example\n\n",
    ],
)
async def test_a_request_in_a_tunnel_reaches_no_other_site(slot: Sandbox, request_in_it: str) -> None:
    answer = await say(slot, f"CONNECT site.example:80 HTTP/1.1\n\n{request_in_it}")
    assert answer.startswith("HTTP/1.1 200 Connection established")
    assert "other.example" not in answer


async def test_a_request_in_a_tunnel_to_its_own_host_is_answered(slot: Sandbox) -> None:
    result = await slot.exec("curl -sS --proxytunnel --max-time 5 http://site.example/", timeout_s=20)
    assert result.output == "public site.example\n"
    split = "exec 9<>/dev/tcp/127.0.0.1/31280; printf 'CONNECT site.example:80 HTTP/1.1\\r\\n\\r\\n' >&9; sleep 0.2; "
    split += "for part in G 'ET / HTTP/1.1\\r' '\\nHost: other.exa' 'mple\\r\\n\\r\\n'; do "
    split += 'printf "$part" >&9; sleep 0.2; done; timeout 3 cat <&9'
    assert "other.example" not in (await slot.exec(split, timeout_s=20)).output
    assert ("other.example", "not allowed") in await refused(slot)


async def test_tls_names_no_host_but_a_listed_one(slot: Sandbox) -> None:
    plain = "curl -ksS --max-time 15 https://site.example/"
    assert (await slot.exec(plain, timeout_s=20)).output == "public site.example\n"
    program = (
        "import socket, ssl, sys\n"
        "s = socket.create_connection(('127.0.0.1', 31280))\n"
        "s.sendall(b'CONNECT site.example:443 HTTP/1.1\\r\\n\\r\\n')\n"
        "assert b' 200 ' in s.recv(4096)\n"
        "c = ssl.create_default_context(); c.check_hostname = False; c.verify_mode = ssl.CERT_NONE\n"
        "c.wrap_socket(s, server_hostname='other.example'); print('THROUGH')\n"
    )
    await slot.write_file("front.py", program)
    assert (await slot.exec("python3 front.py 2>/dev/null", timeout_s=20)).output == ""
    assert ("other.example", "not allowed") in await refused(slot)


async def test_a_slot_cannot_use_the_proxy_of_another_or_change_its_own(server: Server, slot: Sandbox) -> None:
    async with server.lease(SandboxSpec()) as neighbour:
        result = await neighbour.exec("timeout 3 bash -c 'echo >/dev/tcp/127.0.0.1/31280'", timeout_s=20)
        assert result.exit_code != 0
    taking = "python3 -c 'import socket; s=socket.socket(); s.setsockopt(1,15,1); s.bind((\"127.0.0.1\",31280))'"
    assert (await slot.exec(taking)).exit_code != 0


async def test_egress_reaches_public_hosts_and_nothing_of_this_one(server: Server, net: SmallInternet) -> None:
    before = len(net.asked())
    async with server.lease(EGRESS) as slot:
        for host in ("site.example", "other.example", SITE, f"[{SITE6}]", "six.example", "mixed.example"):
            assert (await slot.exec(f"curl -sS --max-time 5 -g 'http://{host}/'", timeout_s=20)).output.startswith(
                "public"
            )
        for host in (HOST, PRIVATE, "127.0.0.1", "[::1]", "0x7f.1", *(f"{name}.example" for name in NOT_PUBLIC)):
            for port in (80, 443, 8080):
                answer = await say(slot, f"CONNECT {host}:{port} HTTP/1.1\n\n")
                assert answer.startswith(("HTTP/1.1 403", "HTTP/1.1 502")), host
        assert (await slot.exec(f"curl -sS --noproxy '*' --max-time 2 http://{SITE}/", timeout_s=20)).exit_code != 0
    assert not [line for line in net.asked()[before:] if line.startswith("inside")]


FLOOD = """
import os, socket
held = []
for i in range(400):
    s = socket.socket()
    s.settimeout(0.2)
    try:
        s.connect(("127.0.0.1", 31280))
        if i % 2:
            s.sendall(b"GET http://host%d.example/ HTTP/1.1\\r\\n\\r\\n" % i)
        else:
            s.sendall(b"A" * 1_000_000)
    except OSError:
        pass
    held.append(s)
"""


async def test_a_flood_fills_neither_the_server_nor_the_record(server: Server) -> None:
    def descriptors() -> int:
        return len(list(Path(f"/proc/{server.ready['pid']}/fd").iterdir()))

    async with server.lease(SPEC) as slot, server.lease(SPEC) as neighbour:
        before = descriptors()
        await slot.write_file("flood.py", FLOOD)
        flood = asyncio.create_task(slot.exec("python3 flood.py", timeout_s=60))
        while not flood.done():
            assert (
                await neighbour.exec("curl -sS http://site.example/", timeout_s=20)
            ).output == "public site.example\n"
            assert descriptors() - before < 300
        await flood
        one = "printf 'GET http://n%d.example/ HTTP/1.1\\r\\n\\r\\n' $i >/dev/tcp/127.0.0.1/31280"
        await slot.exec(f"for i in $(seq 1100); do {one}; done", timeout_s=60)
        assert len(await slot.network_log()) <= 1001


async def test_bytes_are_limited(server: Server, net: SmallInternet) -> None:
    with (net.www / "large").open("wb") as file:
        file.truncate(8 << 20)
    spec = SandboxSpec(network=NetworkRules(allow=("site.example",), max_mb=2))
    async with server.lease(spec) as slot:
        result = await slot.exec("curl -sS http://site.example/large | wc -c", timeout_s=30)
        assert int(result.output.split()[-1]) <= 2 << 20
        assert "used up" in (await slot.exec("curl -sS http://site.example/", timeout_s=20)).output
        assert ("site.example", "over the limit") in await refused(slot)
