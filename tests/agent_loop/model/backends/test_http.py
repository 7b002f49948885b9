"""What users need of HTTP: proxies, redirects, private certificates, kept connections, and no answer taken for
another's.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvicorn
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.model.backends import http
from agent_loop.model.backends.http import Echo, JsonClient
from agent_loop.model.contract import ModelRefused, ModelUnavailable
from emulators.modal import certificates

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n[1, 20]"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[1,\r\n4;x=y\r\n 20]\r\n0\r\nTrailer: 1\r\n\r\n"
ANNOUNCED = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + LENGTH
TO_THE_END = b"HTTP/1.0 200 OK\r\n\r\n[1, 20]"
CLOSING = LENGTH.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")


@pytest.fixture(autouse=True)
def no_proxy_of_this_machine(monkeypatch):
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


class Scripted:
    """A server that answers one request after the other with the bytes of its script, over any connections."""

    def __init__(self, script: Sequence[bytes], hangs_up: bool) -> None:
        self._script = list(script)
        self._hangs_up = hangs_up
        self.connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while self._script:
                await reader.readuntil(b"\r\n\r\n")
                answer = self._script.pop(0)
                writer.write(answer)
                if answer.startswith(b"HTTP/1.0") or self._hangs_up:
                    return
            await reader.read()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted(*script: bytes, hangs_up: bool = False, tls: Any = None) -> AsyncIterator[Scripted]:
    server = Scripted(script, hangs_up)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls)
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()


@asynccontextmanager
async def asking(url: str, **options: Any) -> AsyncIterator[Callable[[], Any]]:
    client = JsonClient(url, **options)
    try:
        yield lambda: client.get("/health")
    finally:
        await client.close()


async def test_a_connection_is_kept_for_the_next_question():
    async with scripted(LENGTH, CHUNKED, ANNOUNCED) as server, asking(server.url) as ask:
        assert [await ask() for _ in range(3)] == [[1, 20]] * 3
    assert server.connections == 1


@pytest.mark.parametrize("last", [CLOSING, TO_THE_END])
async def test_a_connection_that_the_server_gives_up_is_not_used_again(last):
    async with scripted(last, LENGTH) as server, asking(server.url) as ask:
        assert [await ask() for _ in range(2)] == [[1, 20]] * 2
    assert server.connections == 2


async def test_a_connection_that_was_idle_for_long_is_not_trusted(monkeypatch):
    monkeypatch.setattr(http, "KEEP_IDLE_S", 0.0)
    async with scripted(LENGTH, LENGTH) as server, asking(server.url) as ask:
        await ask()
        await ask()
    assert server.connections == 2


async def test_what_comes_unasked_is_never_the_next_answer():
    unasked = LENGTH.replace(b"20]", b"99]")
    async with scripted(LENGTH + unasked, LENGTH) as server, asking(server.url) as ask:
        for _ in range(2):
            with suppress(ModelUnavailable):  # to refuse either is as good: only 99 must never come
                assert await ask() == [1, 20]


@pytest.mark.parametrize("half", [b"", b"HTTP/1.1 20", LENGTH[:-1], CHUNKED[:-8]])
async def test_a_server_that_dies_in_the_middle_of_its_answer_is_unavailable(half):
    async with scripted(half, hangs_up=True) as server:
        client = JsonClient(server.url)
        with pytest.raises(ModelUnavailable):
            await client.post("/generate", {})
        await client.close()


@pytest.mark.parametrize("junk", [b"SSH-2.0-OpenSSH\r\n\r\n", b"\x16\x03\x01\r\n\r\n"])
async def test_what_is_not_http_is_an_error_and_not_an_answer(junk):
    async with scripted(junk, hangs_up=True) as server, asking(server.url) as ask:
        with pytest.raises((ModelUnavailable, ModelRefused)):
            await ask()


async def test_the_answer_to_a_cancelled_question_is_nobodys():
    late = LENGTH.replace(b"20]", b"99]")
    asked, answer_now = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if not asked.is_set():
            asked.set()
            await answer_now.wait()
            writer.write(late)
        else:
            writer.write(LENGTH)
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with asking(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}") as ask:
        first = asyncio.create_task(ask())
        await asked.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        answer_now.set()
        assert await ask() == [1, 20]
    listening.close()


async def test_no_more_connections_than_allowed(monkeypatch):
    monkeypatch.setattr(http, "CONNECTIONS", 2)
    async with scripted(*[LENGTH] * 20) as server, asking(server.url) as ask:
        assert await asyncio.gather(*(ask() for _ in range(20))) == [[1, 20]] * 20
    assert server.connections == 2


def test_a_client_may_be_used_in_one_event_loop_after_the_other():
    listening = socket.create_server(("127.0.0.1", 0))
    client = JsonClient(f"http://127.0.0.1:{listening.getsockname()[1]}")

    async def once() -> Any:
        server = Scripted([LENGTH], hangs_up=False)
        serving = await asyncio.start_server(server.serve, sock=listening.dup())
        answer = await client.get("/health")
        serving.close()
        return answer

    assert [asyncio.run(once()), asyncio.run(once())] == [[1, 20], [1, 20]]
    listening.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
@pytest.mark.parametrize("known_by", ["SSL_CERT_FILE", "ca_file", None])
async def test_https_is_verified_with_a_private_authority_where_one_is_named(tmp_path, monkeypatch, known_by):
    authority, context = certificates.make(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority) if known_by == "SSL_CERT_FILE" else os.devnull)
    ca_file = authority if known_by == "ca_file" else None
    async with scripted(LENGTH, tls=context) as server, asking(server.url, ca_file=ca_file) as ask:
        if known_by:
            assert await ask() == [1, 20]
        else:
            with pytest.raises(ModelRefused, match=r"CERTIFICATE_VERIFY_FAILED.*name its authority in ca_file"):
                await ask()


class Seen:
    """A server, or a proxy, that keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, dict[str, str], int]] = []

    async def handle(self, request: web.BaseRequest) -> web.Response:
        body = await request.read()
        self.asked.append((request.method, str(request.url), dict(request.headers), len(body)))
        if "/moved/" in request.path:
            return web.Response(status=307, headers={"Location": request.path.replace("/moved/", "/")})
        if "/gone/" in request.path:
            return web.Response(status=301, headers={"Location": "/elsewhere"})
        if "/circle/" in request.path:
            return web.Response(status=307, headers={"Location": request.path})
        if request.path == "/elsewhere":
            return web.Response(status=405, text="method not allowed")
        return web.json_response({"ok": True})


@asynccontextmanager
async def seeing() -> AsyncIterator[tuple[Seen, str]]:
    seen = Seen()
    runner = web.ServerRunner(web.Server(seen.handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield seen, f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_server_elsewhere_is_asked_through_the_proxy_and_one_on_this_machine_is_not(monkeypatch):
    async with seeing() as (proxy, proxy_at), seeing() as (server, server_at):
        monkeypatch.setenv("HTTP_PROXY", f"http://us:pa@{proxy_at}")
        async with asking("http://model.example:8000", api_key="k") as ask:
            assert await ask() == {"ok": True}
        [(_, url, headers, _)] = proxy.asked
        assert url == "http://model.example:8000/health"
        assert headers["Authorization"] == "Bearer k"
        assert headers["Proxy-Authorization"] == "Basic dXM6cGE="
        for here in (server_at, server_at.replace("127.0.0.1", "localhost")):
            async with asking(f"http://{here}") as ask:
                await ask()
        assert (len(proxy.asked), len(server.asked)) == (1, 2)


async def test_no_proxy_is_honoured(monkeypatch):
    async with seeing() as (proxy, proxy_at):
        monkeypatch.setenv("HTTP_PROXY", f"http://{proxy_at}")
        monkeypatch.setenv("NO_PROXY", "model.invalid")
        async with asking("http://model.invalid:8000", timeout_s=30) as ask:
            with pytest.raises(ModelUnavailable):
                await ask()
        assert proxy.asked == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
async def test_https_goes_through_a_tunnel_of_the_proxy(tmp_path, monkeypatch):
    authority, context = certificates.make(tmp_path)
    asked = []

    async def tunnel(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append((await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0])
        port = int(server.url.rpartition(":")[2])
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))

    listening = await asyncio.start_server(tunnel, "127.0.0.1", 0)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    monkeypatch.setattr(http, "is_loopback", lambda host: False)  # the certificate is for 127.0.0.1 alone
    async with scripted(LENGTH, tls=context) as server, asking(server.url, ca_file=authority) as ask:
        assert await ask() == [1, 20]
        assert asked == [b"CONNECT " + server.url.removeprefix("https://").encode() + b" HTTP/1.1"]
    listening.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
    except ConnectionError:
        pass
    finally:
        writer.close()


@pytest.mark.parametrize("ids", [3, 400_000])
async def test_a_redirect_is_followed_with_the_whole_request(ids):
    async with seeing() as (server, at):
        client = JsonClient(f"http://{at}/moved", api_key="k")
        assert await client.post("/generate", {"input_ids": [7] * ids}) == {"ok": True}
        await client.close()
    (first, second) = server.asked
    assert second[:2] == ("POST", f"http://{at}/generate")
    assert second[2]["Authorization"] == "Bearer k"
    assert second[3] == first[3] > ids


async def test_a_redirect_that_turns_a_post_into_a_get_is_refused_with_the_address_to_give():
    async with seeing() as (_, at):
        client = JsonClient(f"http://{at}/gone")
        with pytest.raises(ModelRefused, match=f"redirected to http://{at}/elsewhere: give that address"):
            await client.post("/generate", {})
        await client.close()


async def test_redirects_in_a_circle_end():
    async with seeing() as (_, at), asking(f"http://{at}/circle") as ask:
        with pytest.raises(ModelRefused, match="redirected to nowhere"):
            await ask()


async def test_how_long_the_server_wants_to_be_left_alone_is_told():
    busy = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n"
    async with scripted(busy) as server, asking(server.url) as ask:
        with pytest.raises(ModelUnavailable) as caught:
            await ask()
    assert caught.value.retry_after_s == 7.0


async def app(scope: dict[str, Any], receive: Callable[[], Any], send: Callable[[Any], Any]) -> None:
    """Answers with the headers and the body it got; in pieces, so that uvicorn has to chunk."""
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    seen = {name.decode(): value.decode() for name, value in scope["headers"]}
    answer = json.dumps({"path": scope["path"], "headers": seen, "body": json.loads(body or b"null")}).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for k in range(0, len(answer), 10_000):
        await send({"type": "http.response.body", "body": answer[k : k + 10_000], "more_body": True})
    await send({"type": "http.response.body"})


@pytest.mark.parametrize("http", ["h11", "httptools"])
async def test_uvicorn_answers_whatever_it_parses_with(http):
    """vLLM, SGLang and the servers of trainers all run on it, with httptools where it is installed."""
    server = uvicorn.Server(uvicorn.Config(app, http=http, lifespan="off", log_level="error"))
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    client = JsonClient(f"http://us%20er:se%40cret@127.0.0.1:{port}/pre fix/v1/")
    ids = list(range(400_000))  # more than aiohttp likes to send in one piece
    answer = await client.post("/v1/completions", {"prompt": ids})
    again = await client.get("/health")
    await client.close()
    server.should_exit = True
    await serving
    assert answer["body"] == {"prompt": ids}
    assert answer["path"] == "/pre fix/v1/completions"
    assert answer["headers"]["host"] == f"127.0.0.1:{port}"
    assert answer["headers"]["authorization"] == "Basic dXMgZXI6c2VAY3JldA=="
    assert again["path"] == "/pre fix/health"


async def test_faults_name_the_address_without_its_password():
    client = JsonClient("http://user:hunter2@127.0.0.1:9/v1")
    with pytest.raises(ModelUnavailable, match=r"http://127\.0\.0\.1:9/health: ") as caught:
        await client.get("/health")
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("address", ["localhost:8000", "", "ftp://x", "http://", "http://x/v1?key=1"])
def test_what_is_no_address_is_refused_at_once(address):
    with pytest.raises(ValueError, match="is not an address like http"):
        JsonClient(address)


def test_a_key_cannot_smuggle_in_a_header():
    with pytest.raises(ValueError, match="no HTTP header can hold"):
        JsonClient("http://127.0.0.1:9", api_key="k\r\nX-Admin: 1")


IDS = st.lists(st.integers(0, 200_000))


@given(st.text(), IDS, st.sampled_from([None, (", ", ": ")]))
def test_an_echo_is_compared_and_left_out_whatever_the_model_said(text, ids, separators):
    """Even when the model writes the very key, with other ids behind it."""
    said = {"text": f'{text}"prompt_token_ids":[9]{text}', "token_ids": [1], "prompt_token_ids": ids, "text2": text}
    payload = json.dumps(said, separators=separators or (",", ":")).encode()
    echo = Echo("prompt_token_ids", json.dumps(ids, separators=(",", ":")).encode())
    left = json.loads(echo.checked(payload))
    assert left == said | {"prompt_token_ids": left["prompt_token_ids"]}
    assert left["prompt_token_ids"] == (ids if separators else None)


@given(IDS, IDS)
def test_an_echo_of_other_ids_is_refused(sent, seen):
    echo = Echo("prompt_token_ids", json.dumps(sent, separators=(",", ":")).encode())
    payload = json.dumps({"prompt_token_ids": seen}, separators=(",", ":")).encode()
    if sent == seen:
        assert json.loads(echo.checked(payload)) == {"prompt_token_ids": None}
    else:
        with pytest.raises(ModelRefused, match="not the ids that were sent"):
            echo.checked(payload)


async def test_a_connection_that_is_closed_under_a_request_costs_nothing():
    """Servers close kept connections when they like: what was still being written cannot have been acted on."""
    connections = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        headers = await reader.readuntil(b"\r\n\r\n")
        if len(connections) == 1:
            writer.transport.abort()
            return
        length = next(int(line[16:]) for line in headers.split(b"\r\n") if line.startswith(b"Content-Length: "))
        await reader.readexactly(length)
        writer.write(LENGTH)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = JsonClient(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    try:
        assert await client.post("/completion", "x" * (16 << 20)) == [1, 20]
    finally:
        await client.close()
        listening.close()
    assert len(connections) == 2
