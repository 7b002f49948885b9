"""Debian's docker-registry on loopback: plain, or with TLS and a password."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from support.image_layouts import Made, digest

PROGRAM = shutil.which("docker-registry")
USER, PASSWORD = "tester", "s3cret-of-the-registry"
BEHIND_PROXY = "registry.invalid"
"""A name that nothing resolves: only a proxy leads there. The certificate is for it as well."""


@dataclass
class RunningRegistry:
    """A registry that can be pushed to."""

    host: str
    base: str
    certificate: Path | None
    log: Path

    def _ask(self, method: str, path: str, data: bytes | None = None, kind: str = "application/octet-stream") -> str:
        request = urllib.request.Request(path if "://" in path else f"{self.base}{path}", data=data, method=method)
        request.add_header("Content-Type", kind)
        handlers: list[urllib.request.BaseHandler] = []
        if self.certificate is not None:
            passwords = urllib.request.HTTPPasswordMgrWithPriorAuth()
            passwords.add_password(None, self.base, USER, PASSWORD, is_authenticated=True)
            trust = ssl.create_default_context(cafile=str(self.certificate))
            handlers = [urllib.request.HTTPSHandler(context=trust), urllib.request.HTTPBasicAuthHandler(passwords)]
        try:
            with urllib.request.build_opener(*handlers).open(request) as answer:
                return str(answer.headers.get("Location") or "")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.read()!r}") from error

    def push(self, made: Made, name: str, tag: str) -> str:
        """Store an image; its reference."""
        manifest, blobs = made.manifest()
        for blob, data in blobs.items():
            where = self._ask("POST", f"/v2/{name}/blobs/uploads/", b"")
            self._ask("PUT", f"{where}{'&' if '?' in where else '?'}digest={blob}", data)
        self._put_manifest(name, tag, manifest, "application/vnd.oci.image.manifest.v1+json")
        return f"{self.host}/{name}:{tag}"

    def push_index(self, name: str, tag: str, made: list[Made]) -> str:
        """A manifest list of images for several machines."""
        entries = []
        for image in made:
            self.push(image, name, image.architecture)
            manifest = image.manifest()[0]
            kind = "application/vnd.oci.image.manifest.v1+json"
            place = {"os": "linux", "architecture": image.architecture}
            entries.append({"mediaType": kind, "digest": digest(manifest), "size": len(manifest), "platform": place})
        kind = "application/vnd.oci.image.index.v1+json"
        index = {"schemaVersion": 2, "mediaType": kind, "manifests": entries}
        self._put_manifest(name, tag, json.dumps(index).encode(), kind)
        return f"{self.host}/{name}:{tag}"

    def _put_manifest(self, name: str, tag: str, data: bytes, kind: str) -> None:
        self._ask("PUT", f"/v2/{name}/manifests/{tag}", data, kind)


@contextlib.contextmanager
def running_registry(folder: Path, *, secure: bool = False) -> Iterator[RunningRegistry]:
    """A registry with its files in `folder`."""
    assert PROGRAM is not None
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines = ["version: 0.1", "log: {level: warn}", f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}"]
    lines += ["http:", f"  addr: 127.0.0.1:{port}"]
    certificate = None
    if secure:
        certificate, key = _certificate(folder)
        lines += [f"  tls: {{certificate: {certificate}, key: {key}}}"]
        lines += [f"auth: {{htpasswd: {{realm: tests, path: {_passwords(folder)}}}}}"]
    (folder / "config.yml").write_text("\n".join(lines) + "\n")
    log = folder / "registry.log"
    with log.open("wb") as file:
        process = subprocess.Popen([PROGRAM, "serve", str(folder / "config.yml")], stdout=file, stderr=file)
    try:
        _until_open(port, process)
        host = f"{'localhost' if secure else '127.0.0.1'}:{port}"
        yield RunningRegistry(host, f"{'https' if secure else 'http'}://{host}", certificate, log)
    finally:
        process.terminate()
        process.wait()


def _until_open(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise RuntimeError("the registry did not start")


def _certificate(folder: Path) -> tuple[Path, Path]:
    certificate, key = folder / "cert.pem", folder / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += [
        "-addext",
        f"subjectAltName=DNS:localhost,DNS:{BEHIND_PROXY},IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(certificate),
    ]
    subprocess.run(words, check=True, capture_output=True)
    return certificate, key


def _passwords(folder: Path) -> Path:
    """bcrypt is the only form that the registry takes."""
    path = folder / "htpasswd"
    made = subprocess.run(["htpasswd", "-nbB", "-C", "4", USER, PASSWORD], check=True, capture_output=True, text=True)
    path.write_text(made.stdout)
    return path
