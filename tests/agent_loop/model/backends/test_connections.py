"""Connections to an inference server: every way to frame an answer, and no answer ever taken for another's."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from agent_loop.model.backends import connections
from agent_loop.model.backends.connections import AnswerReader, Connections
from agent_loop.model.backends.http import Echo, JsonClient
from agent_loop.model.contract import ModelRefused, ModelUnavailable
from emulators.modal import certificates

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 7\r\n\r\n[1, 20]"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n[1,\r\n4;x=y\r\n 20]\r\n0\r\nTrailer: 1\r\n\r\n"
ANNOUNCED = b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + LENGTH
TO_THE_END = b"HTTP/1.0 200 OK\r\n\r\n[1, 20]"
CLOSING = LENGTH.replace(b"OK\r\n", b"OK\r\nConnection: close\r\n")
EMPTY = b"HTTP/1.1 204 No Content\r\n\r\n"
REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


def pieces(whole: bytes, cuts: list[int]) -> list[bytes]:
    edges = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    return [whole[a:b] for a, b in pairwise(edges)]


@given(st.sampled_from([LENGTH, CHUNKED, ANNOUNCED, CLOSING]), st.lists(st.integers(0, 500)))
def test_an_answer_is_the_same_however_it_is_cut_up(whole, cuts):
    reader = AnswerReader()
    *early, last = pieces(whole, cuts)
    assert [reader.feed(piece) for piece in early] == [None] * len(early)
    assert reader.end() is None, "half an answer is none"
    answer = reader.feed(last)
    assert (answer.status, answer.body, answer.keeps) == (200, b"[1, 20]", whole is not CLOSING)


def test_an_answer_without_a_length_ends_with_the_connection():
    reader = AnswerReader()
    assert reader.end() is None
    assert reader.feed(TO_THE_END) is None
    answer = reader.end()
    assert (answer.body, answer.keeps) == (b"[1, 20]", False)


def test_an_answer_can_be_empty():
    assert AnswerReader().feed(EMPTY).body == b""


@pytest.mark.parametrize("junk", [b"SSH-2.0-OpenSSH\r\n", b"HTTP/2 200\r\n\r\n", LENGTH + b"more", b"\x16\x03\x01"])
def test_what_is_not_one_http_answer_is_an_error(junk):
    with pytest.raises(ConnectionError):
        AnswerReader().feed(junk)


class Scripted:
    """A server that answers one request after the other with the bytes of its script, over any connections."""

    def __init__(self, script: Sequence[bytes], hangs_up: bool) -> None:
        self._script = list(script)
        self._hangs_up = hangs_up
        self.connections = 0
        self.address = urlsplit("")

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
    port = listening.sockets[0].getsockname()[1]
    server.address = urlsplit(f"{'https' if tls else 'http'}://127.0.0.1:{port}")
    try:
        yield server
    finally:
        listening.close()


@asynccontextmanager
async def asking(server: Scripted) -> AsyncIterator[Callable[[], Any]]:
    pool = Connections(server.address)
    try:
        yield lambda: pool.ask(REQUEST)
    finally:
        pool.close()


async def test_a_connection_is_kept_for_the_next_question():
    async with scripted(LENGTH, CHUNKED, ANNOUNCED) as server, asking(server) as ask:
        assert [(await ask()).body for _ in range(3)] == [b"[1, 20]"] * 3
    assert server.connections == 1


@pytest.mark.parametrize("last", [CLOSING, TO_THE_END])
async def test_a_connection_that_the_server_gives_up_is_not_used_again(last):
    async with scripted(last, LENGTH) as server, asking(server) as ask:
        assert [(await ask()).body for _ in range(2)] == [b"[1, 20]"] * 2
    assert server.connections == 2


async def test_a_connection_that_was_idle_for_long_is_not_trusted(monkeypatch):
    monkeypatch.setattr(connections, "KEEP_IDLE_S", 0.0)
    async with scripted(LENGTH, LENGTH) as server, asking(server) as ask:
        await ask()
        await ask()
    assert server.connections == 2


async def test_what_comes_unasked_ends_the_connection():
    async with scripted(LENGTH, LENGTH) as server:
        pool = Connections(server.address)
        await pool.ask(REQUEST)
        (connection,) = pool._idle
        connection.data_received(LENGTH)
        await pool.ask(REQUEST)
        pool.close()
    assert server.connections == 2


@pytest.mark.parametrize("half", [b"", b"HTTP/1.1 20", LENGTH[:-1], CHUNKED[:-4]])
async def test_a_cut_off_answer_is_an_error(half):
    async with scripted(half, hangs_up=True) as server, asking(server) as ask:
        with pytest.raises(ConnectionResetError, match="before its answer was whole"):
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
    pool = Connections(urlsplit(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"))
    first = asyncio.create_task(pool.ask(REQUEST))
    await asked.wait()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    answer_now.set()
    assert (await pool.ask(REQUEST)).body == b"[1, 20]"
    pool.close()
    listening.close()


async def test_no_more_connections_than_allowed(monkeypatch):
    monkeypatch.setattr(connections, "CONNECTIONS", 2)
    async with scripted(*[LENGTH] * 20) as server, asking(server) as ask:
        answers = await asyncio.gather(*(ask() for _ in range(20)))
    assert [answer.body for answer in answers] == [b"[1, 20]"] * 20
    assert server.connections == 2


def test_connections_of_an_ended_event_loop_are_not_used():
    pools = []

    async def once() -> int:
        async with scripted(LENGTH) as server:
            pools.append(Connections(server.address) if not pools else pools[0])
            pools[0]._port = server.address.port
            await pools[0].ask(REQUEST)
            return server.connections

    assert [asyncio.run(once()), asyncio.run(once())] == [1, 1]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make certificates")
@pytest.mark.parametrize("known", [True, False])
async def test_https_is_verified(tmp_path, monkeypatch, known):
    authority, context = certificates.make(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority) if known else "/dev/null")
    async with scripted(LENGTH, tls=context) as server, asking(server) as ask:
        if known:
            assert (await ask()).body == b"[1, 20]"
        else:
            with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
                await ask()


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
    """vLLM, SGLang and the servers of trainers all run on it."""
    server = uvicorn.Server(uvicorn.Config(app, http=http, lifespan="off", log_level="error"))
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    client = JsonClient(f"http://us%20er:se%40cret@127.0.0.1:{port}/pre fix/v1/")
    ids = list(range(50_000))
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


async def test_a_redirect_is_refused_with_the_address_to_give():
    moved = b"HTTP/1.1 307 Temporary Redirect\r\nLocation: https://there/v1\r\nContent-Length: 0\r\n\r\n"
    async with scripted(moved) as server:
        client = JsonClient(server.address.geturl())
        with pytest.raises(ModelRefused, match="HTTP 307 to https://there/v1: give that address"):
            await client.get("/health")
        await client.close()


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
