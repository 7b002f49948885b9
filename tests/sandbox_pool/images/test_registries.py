"""Images from a real registry: names, logins, mirrors, broken downloads. No login leaves the client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from sandbox_pool import SandboxSpec, SlotPool
from sandbox_pool.config import ImageSettings
from sandbox_pool.errors import ImageError
from sandbox_pool.images import registry as registry_module
from sandbox_pool.images.image_source import Reference, this_architecture
from sandbox_pool.images.supply import Images
from sandbox_pool.server.images.layer_store import LayerStore
from support.image_layouts import Made, digest, entry, pack
from support.image_registry import BEHIND_PROXY, PASSWORD, USER, RunningRegistry, running_registry


def make(content: str, **facts) -> Made:
    return Made([pack([entry("content", data=content.encode() * 1000)])], **facts)


@pytest.fixture
def images(tmp_path: Path) -> Callable[..., Images]:
    return lambda **settings: Images(ImageSettings(**settings), cache=tmp_path / "cache")


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    return LayerStore(str(tmp_path / "store"), "user")


def content(store: LayerStore) -> str:
    (layer,) = (Path(store.path) / "user/layers").iterdir()
    return (layer / "content").read_text()


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("python", "docker.io/library/python:latest"),
        ("python:3.12-slim", "docker.io/library/python:3.12-slim"),
        ("swebench/sweb.eval.x86_64.a_1776_b:latest", "docker.io/swebench/sweb.eval.x86_64.a_1776_b:latest"),
        ("localhost:5000/x:1", "localhost:5000/x:1"),
        ("localhost/x", "localhost/x:latest"),
        ("ghcr.io/x/y@sha256:" + "a" * 64, "ghcr.io/x/y@sha256:" + "a" * 64),
        ("[::1]:5000/x", "[::1]:5000/x:latest"),
    ],
)
def test_references_are_read_as_docker_reads_them(text: str, whole: str) -> None:
    assert str(Reference.parse(text)) == whole


@pytest.mark.parametrize("text", ["UPPER/case", "a b", "x@sha256:short", "", "a//b", "x:", "../x", "https://x/y"])
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(ImageError):
        Reference.parse(text)


def test_a_password_in_a_name_is_refused_and_not_repeated() -> None:
    with pytest.raises(ImageError) as refusal:
        Reference.parse("https://me:hunter2@registry.example/x")
    assert "hunter2" not in str(refusal.value)


async def test_by_tag_by_digest_and_by_this_machine(
    registry: RunningRegistry, images: Callable[..., Images], store: LayerStore
) -> None:
    other = "arm64" if this_architecture() != "arm64" else "amd64"
    name = registry.push_index("many", "1", [make("theirs", architecture=other), make("ours")])
    source = images()
    await source.pull(name, store)
    assert content(store).startswith("ours")
    assert await source.pull(name, store) == []
    exact = name.rpartition(":")[0] + "@" + _manifest_digest(make("ours"))
    assert (await source.find(exact)).digest == (await source.find(name)).digest
    with pytest.raises(ImageError, match=f"is for {other}"):
        await source.find(f"{registry.host}/many:{other}")
    with pytest.raises(ImageError, match="has no"):
        await source.find(f"{registry.host}/many:absent")
    await source.close()


def _manifest_digest(made: Made) -> str:
    return digest(made.manifest()[0])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.skipif(os.getuid() != 0, reason="the store of the pool is root's")
async def test_a_slot_runs_an_image_of_a_registry(registry: RunningRegistry, app: Made, pool: SlotPool) -> None:
    name = registry.push(app, "tasks/app", "1")
    async with pool.lease("t", SandboxSpec(image=name)) as box:
        assert (await box.exec("cat main.py; id -u")).output == "print('hi')\n1234\n"


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRegistry]:
    """With TLS of a private CA, and a password."""
    if shutil.which("docker-registry") is None or shutil.which("htpasswd") is None:
        pytest.skip("docker-registry and htpasswd (apache2-utils) are not both installed")
    with running_registry(tmp_path_factory.mktemp("secure"), secure=True) as running:
        running.push(make("private"), "private", "1")
        yield running


@pytest.fixture
def trusted(secure: RunningRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunningRegistry:
    """The CA where docker keeps it, and no login yet."""
    place = tmp_path / "certs.d" / secure.host
    place.mkdir(parents=True)
    assert secure.certificate is not None
    (place / "ca.crt").write_bytes(secure.certificate.read_bytes())
    monkeypatch.setattr(registry_module, "CERTIFICATES", (tmp_path / "certs.d",))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "docker").mkdir()
    return secure


async def test_without_a_login_or_the_ca_it_is_refused_in_a_sentence(
    secure: RunningRegistry, trusted: RunningRegistry, images: Callable[..., Images], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = images()
    with pytest.raises(ImageError, match="docker login"):
        await source.find(f"{secure.host}/private:1")
    await source.close()
    monkeypatch.setattr(registry_module, "CERTIFICATES", ())
    source = images()
    with pytest.raises(ImageError, match="certificate"):
        await source.find(f"{secure.host}/private:1")
    await source.close()


@pytest.mark.parametrize("way", ["file", "helper", "store"])
async def test_logins_of_docker_are_used(
    trusted: RunningRegistry,
    images: Callable[..., Images],
    store: LayerStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(0)
    encoded = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    config = {
        "file": {"auths": {trusted.host: {"auth": encoded}}},
        "helper": {"credHelpers": {trusted.host: "tests"}},
        "store": {"credsStore": "tests"},
    }[way]
    (tmp_path / "docker/config.json").write_text(json.dumps(config))
    helper = tmp_path / "docker-credential-tests"
    answer = json.dumps({"Username": USER, "Secret": PASSWORD})
    helper.write_text(f"#!/bin/sh\nread host; [ \"$host\" = {trusted.host} ] || exit 1\necho '{answer}'\n")
    helper.chmod(helper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    source = images()
    await source.pull(f"{trusted.host}/private:1", store)
    await source.close()
    assert content(store).startswith("private")
    assert PASSWORD not in caplog.text
    assert encoded not in caplog.text


class ConnectProxy:
    """A proxy that opens tunnels to this machine, whatever name it is asked for, for those who know its password."""

    LOGIN = "walker:pass-of-the-proxy"

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.opens = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, target, *_ = head.split()
        known = f"Basic {base64.b64encode(self.LOGIN.encode()).decode()}" in head
        self.asked.append((f"{method} {target}", known))
        if not known or not self.opens:
            writer.write(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")
            writer.close()
            return
        to, out = await asyncio.open_connection("127.0.0.1", int(target.rpartition(":")[2]))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(self._copy(reader, out), self._copy(to, writer))

    @staticmethod
    async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        target.close()


async def test_a_registry_behind_a_proxy_with_a_private_ca_and_a_login(
    trusted: RunningRegistry,
    images: Callable[..., Images],
    store: LayerStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(0)
    host = f"{BEHIND_PROXY}:{trusted.host.rpartition(':')[2]}"
    shutil.copytree(tmp_path / "certs.d" / trusted.host, tmp_path / "certs.d" / host)
    encoded = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {host: {"auth": encoded}}}))
    proxy = ConnectProxy()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.LOGIN}@127.0.0.1:{server.sockets[0].getsockname()[1]}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    source = images()
    await source.pull(f"{host}/private:1", store)
    await source.close()
    assert content(store).startswith("private")
    assert set(proxy.asked) == {(f"CONNECT {host}", True)}
    proxy.opens = False
    source = images()
    with pytest.raises(ImageError, match="403") as told:
        await source.find(f"{host}/private:1")
    await source.close()
    monkeypatch.setenv("NO_PROXY", "localhost")
    seen, source = len(proxy.asked), images()
    with pytest.raises(ImageError, match="docker login"):
        await source.find(f"{trusted.host}/private:1")
    await source.close()
    server.close()
    assert len(proxy.asked) == seen
    for secret in (PASSWORD, encoded, proxy.LOGIN.partition(":")[2]):
        assert secret not in caplog.text + str(told.value)


class Front:
    """A registry's front that asks for a bearer token and cuts downloads."""

    def __init__(self, behind: str) -> None:
        self.behind = behind
        self.cuts = 3
        self.ranges: list[str] = []
        self.tokens: list[str | None] = []

    async def token(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers.get("Authorization"))
        return web.json_response({"token": f"for-{request.query['scope']}"})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if request.headers.get("Authorization") != f"Bearer for-repository:{name}:pull":
            realm = f'Bearer realm="http://{request.host}/token",service="s",scope="repository:{name}:pull"'
            return web.Response(status=401, headers={"WWW-Authenticate": realm})
        async with (
            ClientSession() as session,
            session.get(
                f"{self.behind}{request.path}",
                headers={k: v for k, v in request.headers.items() if k in ("Accept", "Range")},
            ) as inner,
        ):
            data = await inner.read()
            headers = {"Content-Type": inner.content_type}
            if "/blobs/" not in request.path or len(data) < 1000:
                return web.Response(body=data, status=inner.status, headers=headers)
            self.ranges.append(request.headers.get("Range", ""))
            response = web.StreamResponse(status=inner.status, headers={**headers, "Content-Length": str(len(data))})
            await response.prepare(request)
            if self.cuts:
                self.cuts -= 1
                await response.write(data[: len(data) // 2])
                request.transport.abort()
            else:
                await response.write(data)
            return response


async def test_bearer_tokens_mirrors_and_downloads_that_are_cut(
    registry: RunningRegistry, images: Callable[..., Images], store: LayerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = pack([entry("content", data=os.urandom(3 << 20))])
    registry.push(Made([layer], compress=bytes), "behind", "1")
    front = Front(registry.base)
    app = web.Application()
    app.router.add_get("/token", front.token)
    app.router.add_get("/v2/{name}/{rest:.*}", front.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    monkeypatch.setattr(registry_module, "BACKOFF_S", 0.001)
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    source = images(mirrors={"unreachable.example": [address]})
    try:
        await source.pull("unreachable.example/behind:1", store)
    finally:
        await source.close()
        await runner.cleanup()
    assert front.tokens[0] is None
    assert [text != "" for text in front.ranges] == [False, True, True, True]
    assert len({*front.ranges}) == 4
    assert store.missing([digest(layer)]) == []


@pytest.fixture
async def answers() -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """A registry's address, and what it answers to each path: objects as JSON."""
    found: dict[str, Any] = {}

    async def answer(request: web.Request) -> web.Response:
        value = found.get(request.path.rpartition("/")[2])
        return web.Response(status=404) if value is None else web.Response(body=value)

    app = web.Application()
    app.router.add_get("/v2/{rest:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"127.0.0.1:{runner.addresses[0][1]}", found
    await runner.cleanup()


HOSTILE = {
    "a path as the digest of a layer": ("layers", [{"digest": "sha256:../../victim", "size": 6}], "layers.0.digest"),
    "a path as the digest of the configuration": ("config", {"digest": "../../../v2/x/y"}, "config.digest"),
    "a negative size": ("layers", [{"digest": "sha256:" + "0" * 64, "size": -1}], "layers.0.size"),
    "words for layers": ("layers", ["x"], "layers.0"),
    "no layers": ("layers", None, "a kind that is no longer used"),
    "another machine": (
        "manifests",
        [{"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "riscv64"}}],
        "only for riscv64",
    ),
    "entries that are none": ("manifests", ["x"], "manifests.0"),
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_a_hostile_manifest_is_refused_and_names_no_file(
    case: str, answers: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    host, found = answers
    (tmp_path / "victim").write_bytes(b"of the user")
    before = _facts(tmp_path)
    made = make("hostile")
    manifest, blobs = made.manifest()
    key, value, why = HOSTILE[case]
    found.update(blobs, latest=json.dumps({**json.loads(manifest), key: value}).encode())
    found["victim"] = b"hostile"
    source = Images(ImageSettings(store_dir=tmp_path / "store"), tmp_path / "cache")
    try:
        with pytest.raises(ImageError, match=why):
            await source.pull(f"{host}/hostile", LayerStore(str(tmp_path / "store"), "user"))
    finally:
        await source.close()
    assert _facts(tmp_path) == before


def _facts(folder: Path) -> list[tuple[str, bytes, int]]:
    return [(path.name, path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()]


@pytest.mark.parametrize(
    "document",
    [
        {"rootfs": "x"},
        {"rootfs": {"diff_ids": [1]}},
        {"config": {"Env": [1]}},
        {"config": {"Env": ["A=\0"]}},
        {"config": {"User": 5}},
        {"config": {"WorkingDir": ["/"]}},
        {"architecture": {}},
    ],
    ids=json.dumps,
)
async def test_a_damaged_configuration_is_refused(document: dict[str, Any], tmp_path: Path) -> None:
    class Damaged(Made):
        @property
        def document(self) -> bytes:
            return json.dumps({**json.loads(super().document), **document}).encode()

    source = Images(ImageSettings(store_dir=tmp_path / "store"), tmp_path / "cache")
    with pytest.raises(ImageError, match=r"the configuration of .* cannot be read"):
        await source.find(Damaged([pack([entry("a")])]).layout(tmp_path / "image"))
    await source.close()


async def test_what_a_killed_download_left_is_used(tmp_path: Path) -> None:
    cache = registry_module.BlobCache(tmp_path)
    data = os.urandom(100_000)
    name = digest(data)
    (tmp_path / f"{name[7:]}.partial").write_bytes(data[:60_000])
    seen: list[int] = []

    async def rest(target: Path) -> None:
        with target.open("ab") as file:
            seen.append(file.tell())
            file.write(data[seen[0] :])

    paths = await asyncio.gather(*(cache.fetch(name, len(data), rest) for _ in range(3)))
    assert seen == [60_000]
    assert {path.read_bytes() for path in paths} == {data}
    assert {path.parent for path in paths} == {tmp_path}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("whom", ["the command", "all of its processes"])
def test_a_pull_killed_at_any_moment_leaves_no_half_layer_and_gc_nothing(
    registry: RunningRegistry, tmp_path: Path, whom: str
) -> None:
    made = Made([pack([entry(f"f{n}", data=os.urandom(50_000)) for n in range(100)]) for _ in range(4)])
    name = registry.push(made, f"killed-{whom.split()[0]}", "1")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    where = ["--store-dir", str(tmp_path / "store")]

    def start(*words: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "environments.apps.cli.main", "pool", "images", *words]
        return subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)

    def layers() -> list[int]:
        return [len(list(path.iterdir())) for path in tmp_path.glob("store/user/layers/*")]

    began_s = time.monotonic()
    assert start("pull", name, *where).wait() == 0
    whole_s = time.monotonic() - began_s
    assert layers() == [100] * 4
    chance, stopped = random.Random(25), 0
    for _ in range(20):
        assert start("gc", "--max-gb", "0", *where).wait() == 0
        process = start("pull", name, *where)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.2, 1) * whole_s)
        stopped += process.poll() is None
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL) if whom == "the command" else os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert set(layers()) <= {100}
    assert stopped >= 10
    assert start("pull", name, *where).wait() == 0
    assert layers() == [100] * 4
    assert start("gc", "--max-gb", "0", *where).wait() == 0
    left = [path for top in ("store/user", "cache/hermes-rl/blobs") for path in tmp_path.glob(f"{top}/**/*")]
    assert [path.name for path in left if path.is_file()] == ["drafts"]
