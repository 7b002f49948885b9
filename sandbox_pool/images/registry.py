"""Reads images from registries: manifests, configurations and blobs, with the logins of this user.

Logins come from the files that `docker login` and `podman login` write, and from their credential helpers. They stay in
this process: a slot server gets layers, never a login. What was downloaded of a blob is kept, and the next try goes on
from there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from pydantic import BaseModel

from sandbox_pool.errors import ImageError
from sandbox_pool.images.image_source import (
    MAX_DOCUMENT,
    PIECE,
    Blob,
    FolderFiles,
    Image,
    Manifest,
    Reference,
    Text,
    check_digest,
    choose_platform,
    file_blob,
    make_image,
    parse_document,
)
from sandbox_pool.server.images.layer_store import hex_of

MANIFESTS = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
CERTIFICATES = Path("/etc/docker/certs.d"), Path("/etc/containers/certs.d")
ATTEMPTS = 5
BACKOFF_S = 0.2
HELPER_TIMEOUT_S = 30.0
_CHALLENGE = re.compile(r'(\w+)="([^"]*)"')
Json = dict[str, Any]
Progress = Callable[[str, int, int], None]
"""Blob, bytes that are here, bytes in all."""


class _Answer(BaseModel):
    token: Text | None = None
    access_token: Text | None = None


class Refused(ImageError):
    """The registry answered, and the answer is no: trying again does not help."""


class Logins:
    """What this user logged in with, by registry."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        home = Path(environ.get("HOME") or "~").expanduser()
        runtime = environ.get("XDG_RUNTIME_DIR")
        self._files = [
            Path(environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json",
            *([Path(environ["REGISTRY_AUTH_FILE"])] if environ.get("REGISTRY_AUTH_FILE") else []),
            *([Path(runtime) / "containers/auth.json"] if runtime else []),
            home / ".config/containers/auth.json",
        ]

    async def find(self, host: str) -> tuple[str, str] | None:
        """User and password; None when there is no login. The user `<token>` says that the password is a token."""
        for path in self._files:
            document = await asyncio.to_thread(_document, path)
            if (found := await self._in_file(document, host)) is not None:
                return found
        return None

    async def _in_file(self, document: Json, host: str) -> tuple[str, str] | None:
        names = [host, f"https://{host}", f"https://{host}/v1/", f"https://{host}/v2/"]
        if host == "docker.io":
            names += ["https://index.docker.io/v1/", "index.docker.io", "registry-1.docker.io"]
        helpers = document.get("credHelpers") or {}
        for name in names:
            helper = helpers.get(name)
            if helper and (found := await _ask_helper(helper, name)) is not None:
                return found
        for name in names:
            entry = (document.get("auths") or {}).get(name) or {}
            if entry.get("identitytoken"):
                return "<token>", str(entry["identitytoken"])
            if entry.get("auth"):
                user, _, password = base64.b64decode(entry["auth"]).decode("utf-8", "replace").partition(":")
                return user, password.rstrip("\0")
        store = document.get("credsStore")
        for name in names if store else ():
            if (found := await _ask_helper(str(store), name)) is not None:
                return found
        return None


def _document(path: Path) -> Json:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


async def _ask_helper(helper: str, host: str) -> tuple[str, str] | None:
    program = shutil.which(f"docker-credential-{helper}")
    if program is None:
        return None
    process = await asyncio.create_subprocess_exec(
        program, "get", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(HELPER_TIMEOUT_S):
            out, _ = await process.communicate(host.encode())
    except TimeoutError:
        process.kill()
        await process.wait()
        return None
    try:
        answer = json.loads(out) if process.returncode == 0 else {}
    except ValueError:
        answer = {}
    return (str(answer["Username"]), str(answer["Secret"])) if "Secret" in answer else None


class Registry:
    """One registry, or a mirror of it, spoken to over one session."""

    def __init__(self, host: str, address: str | None, logins: Logins) -> None:
        self._host = host
        self._bases = _bases(host, address)
        self._logins = logins
        self._session: aiohttp.ClientSession | None = None
        self._tokens: dict[str, str] = {}

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, connect=30, sock_read=120)
            # `trust_env`: HTTPS_PROXY and its like.
            connector = aiohttp.TCPConnector(ssl=_trust(self._host))
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=True, connector=connector)
        return self._session

    @contextlib.asynccontextmanager
    async def get(self, name: str, path: str, headers: Mapping[str, str]) -> AsyncIterator[aiohttp.ClientResponse]:
        """GET below a repository, logged in as far as the registry asks for it."""
        for attempt in range(2):
            response = await self._try_bases(name, path, headers)
            if response.status != 401 or attempt:
                break
            challenge = response.headers.get("WWW-Authenticate", "")
            response.release()
            await self._log_in(name, challenge)
        try:
            if response.status in (401, 403):
                raise Refused(f"{self._host} refuses {name}: log in with `docker login {self._host}`")
            if response.status == 404:
                raise Refused(f"{self._host} has no {name} {path.rpartition('/')[2][:80]}")
            if response.status >= 400:
                raise ImageError(f"{self._host} answered {response.status} for {name}")
            yield response
        finally:
            response.release()

    async def _try_bases(self, name: str, path: str, headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        error: Exception | None = None
        for base in list(self._bases):
            token = self._tokens.get(name)
            sent = {**headers, **({"Authorization": token} if token else {})}
            try:
                response = await self._open().get(f"{base}/v2/{name}/{path}", headers=sent)
            except aiohttp.ClientConnectorCertificateError as failure:
                # Never without encryption because of this: whoever answers is not the one it should be.
                raise Refused(
                    f"the certificate of {self._host} is not trusted: {failure.certificate_error}"
                ) from failure
            except (aiohttp.ClientConnectorError, aiohttp.ServerDisconnectedError, ssl.SSLError) as failure:
                error = error or failure
                continue
            self._bases = [base]
            return response
        raise ImageError(f"the registry {self._host} cannot be reached: {error}") from error

    async def _log_in(self, name: str, challenge: str) -> None:
        kind, _, rest = challenge.partition(" ")
        facts = dict(_CHALLENGE.findall(rest))
        login = await self._logins.find(self._host)
        if kind.lower() == "basic":
            if login is not None:
                text = base64.b64encode(f"{login[0]}:{login[1]}".encode()).decode()
                self._tokens[name] = f"Basic {text}"
            return
        if kind.lower() != "bearer" or "realm" not in facts:
            raise Refused(f"{self._host} asks for a login of an unknown kind")
        if not facts["realm"].startswith("https://") and not self._bases[0].startswith("http://"):
            raise Refused(f"{self._host} sends logins to an address without encryption")
        self._tokens[name] = f"Bearer {await self._bearer(facts, name, login)}"

    async def _bearer(self, facts: Mapping[str, str], name: str, login: tuple[str, str] | None) -> str:
        query = {"scope": facts.get("scope") or f"repository:{name}:pull", "service": facts.get("service", "")}
        if login is not None and login[0] == "<token>":
            form = {**query, "grant_type": "refresh_token", "refresh_token": login[1], "client_id": "hermes-rl"}
            asking = self._open().post(facts["realm"], data=form)
        else:
            auth = aiohttp.BasicAuth(*login) if login else None
            asking = self._open().get(facts["realm"], params=query, auth=auth)
        async with asking as response:
            if response.status >= 400:
                raise Refused(f"{self._host} refuses the login for {name}")
            answer = parse_document(_Answer, await response.read(), f"the token of {self._host}")
        token = answer.token or answer.access_token
        if not token:
            raise Refused(f"{self._host} gave no token for {name}")
        return token

    async def document(self, name: str, path: str, accept: str = "*/*") -> bytes:
        """A manifest or configuration."""
        async with self.get(name, path, {"Accept": accept}) as response:
            data = await response.content.read(MAX_DOCUMENT)
            while part := await response.content.read(MAX_DOCUMENT):
                data += part
                if len(data) > MAX_DOCUMENT:
                    raise ImageError(f"{name}: a document of more than {MAX_DOCUMENT} bytes")
            return data

    async def download(self, name: str, digest: str, size: int, target: Path, progress: Progress) -> None:
        """Append to what is in the file already; a server that sends everything again is taken at its word."""
        have = target.stat().st_size
        headers = {"Range": f"bytes={have}-"} if have else {}
        async with self.get(name, f"blobs/{digest}", headers) as response:
            with target.open("r+b") as file:
                if response.status == 206:
                    file.seek(have)
                else:
                    have = 0
                    file.truncate(0)
                async for data in response.content.iter_chunked(PIECE):
                    have += len(data)
                    if size and have > size:
                        raise ImageError(f"{name}: the blob {digest[:23]}... is larger than its manifest says")
                    await asyncio.to_thread(file.write, data)
                    progress(digest, have, size)


def _bases(host: str, address: str | None) -> list[str]:
    """Addresses to try. A registry on this machine may speak without encryption, as with docker."""
    if address is not None:
        return [address.rstrip("/")]
    real = "registry-1.docker.io" if host == "docker.io" else host
    name = host.rpartition(":")[0] or host
    plain = name in ("localhost", "127.0.0.1", "[::1]") or name.endswith(".localhost")
    return [f"https://{real}", *([f"http://{real}"] if plain else [])]


def _trust(host: str) -> ssl.SSLContext:
    """The machine's certificates, and those that docker and podman keep for this registry."""
    context = ssl.create_default_context()
    for place in (*CERTIFICATES, Path.home() / ".config/containers/certs.d"):
        for path in sorted((place / host).glob("*.crt")):
            context.load_verify_locations(path)
    return context


class BlobCache:
    """Downloaded blobs of this user: complete ones by digest, others to go on with."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def complete(self, digest: str) -> Path:
        """Where the blob is once all of it is here."""
        return self._path / hex_of(digest)

    async def fetch(
        self, digest: str, size: int, download: Callable[[Path], Any], progress: Progress = lambda *_: None
    ) -> Path:
        """The complete blob, downloaded by whoever is first; what a killed process got is used."""
        final, partial_path = self.complete(digest), self._path / f"{hex_of(digest)}.partial"
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(partial_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await asyncio.to_thread(fcntl.flock, fd, fcntl.LOCK_EX)
            if final.exists():
                final.touch()
                partial_path.unlink(missing_ok=True)
                return final
            if not os.path.lexists(partial_path) or os.fstat(fd).st_ino != partial_path.stat().st_ino:
                return await self.fetch(digest, size, download, progress)  # the one who had the lock has removed it
            await self._fill(partial_path, digest, download)
            partial_path.rename(final)
            return final
        finally:
            os.close(fd)

    @staticmethod
    async def _fill(path: Path, digest: str, download: Callable[[Path], Any]) -> None:
        for attempt in range(ATTEMPTS):
            try:
                await download(path)
            except Refused:
                raise
            except (aiohttp.ClientError, OSError, TimeoutError, ImageError) as error:
                if attempt == ATTEMPTS - 1:
                    if isinstance(error, ImageError):
                        raise
                    raise ImageError(f"the blob {digest[:23]}... cannot be downloaded: {error}") from error
                await asyncio.sleep(BACKOFF_S * 2**attempt)
                continue
            found = await asyncio.to_thread(_digest_of, path)
            if found == digest:
                return
            path.write_bytes(b"")
        raise ImageError(f"the blob {digest[:23]}... has the digest {found[:23]}...")

    def drop(self, digest: str) -> None:
        """It is on its host now and not needed here."""
        self.complete(digest).unlink(missing_ok=True)

    def collect(self, max_bytes: int) -> int:
        """Remove what was used longest ago; bytes that went."""
        files = sorted((path for path in self._path.glob("*") if path.is_file()), key=lambda path: path.stat().st_mtime)
        total, gone = sum(path.stat().st_size for path in files), 0
        for path in files:
            if total <= max_bytes:
                break
            with path.open("rb") as file, contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                size = path.stat().st_size
                path.unlink()
                total, gone = total - size, gone + size
        return gone


def _digest_of(path: Path) -> str:
    with path.open("rb") as file:
        return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"


class Registries:
    """All registries that images of this process come from."""

    def __init__(self, cache: BlobCache, mirrors: Mapping[str, list[str]], logins: Logins | None = None) -> None:
        self.cache = cache
        self._mirrors = mirrors
        self._logins = logins or Logins()
        self._open: dict[tuple[str, str | None], Registry] = {}
        self.progress: Progress = lambda *_: None

    async def close(self) -> None:
        """End all sessions."""
        for registry in self._open.values():
            await registry.close()
        self._open.clear()

    def _registries(self, host: str) -> list[Registry]:
        """Mirrors first, then the registry itself."""
        found = []
        for address in (*self._mirrors.get(host, ()), None):
            key = host, address
            if key not in self._open:
                named = host if address is None else address.partition("://")[2].partition("/")[0]
                self._open[key] = Registry(named, address, self._logins)
            found.append(self._open[key])
        return found

    async def image(self, name: str) -> Image:
        """What is behind a reference now, from the first place that has it."""
        reference = Reference.parse(name)
        failures = []
        for registry in self._registries(reference.host):
            try:
                return await self._image(registry, reference)
            except (ImageError, aiohttp.ClientError, OSError, TimeoutError) as error:
                failures.append(str(error) or type(error).__name__)
        raise ImageError(f"the image {name!r} cannot be had: {'; '.join(failures)}")

    async def _image(self, registry: Registry, reference: Reference) -> Image:
        manifest, what = await self._manifest(registry, reference, reference.digest or reference.tag), str(reference)
        if manifest.manifests is not None:
            manifest = await self._manifest(registry, reference, choose_platform(manifest.manifests, what).digest)
        if manifest.config is None or manifest.layers is None:
            raise Refused(f"{what} has a manifest of a kind that is no longer used")
        config = manifest.config.digest
        data = await registry.document(reference.name, f"blobs/{config}")
        check_digest(data, config, f"the configuration of {what}")
        blobs: list[tuple[str | None, int, Blob]] = []
        for layer in manifest.layers:
            size = layer.size or 0
            blobs.append((layer.digest, size, self._blob(reference, layer.digest, size)))
        return make_image(what, config, data, blobs)

    @staticmethod
    async def _manifest(registry: Registry, reference: Reference, wanted: str) -> Manifest:
        data = await registry.document(reference.name, f"manifests/{wanted}", MANIFESTS)
        if wanted.startswith("sha256:"):
            check_digest(data, wanted, f"the manifest of {reference}")
        return parse_document(Manifest, data, f"the manifest of {reference}")

    def _blob(self, reference: Reference, digest: str, size: int) -> Blob:
        async def stream() -> AsyncIterator[bytes]:
            path = await self.cache.fetch(digest, size, partial(self._download, reference, digest, size), self.progress)
            async for piece in file_blob(FolderFiles(path.parent), path.name)():
                yield piece

        return stream

    async def _download(self, reference: Reference, digest: str, size: int, target: Path) -> None:
        failures: list[Exception] = []
        for registry in self._registries(reference.host):
            try:
                await registry.download(reference.name, digest, size, target, self.progress)
            except (ImageError, aiohttp.ClientError, OSError, TimeoutError) as error:
                failures.append(error)
            else:
                return
        raise failures[-1]
