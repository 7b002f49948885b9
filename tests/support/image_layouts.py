"""Images made by hand: layers from entries, layouts and archives from layers. No engine is needed."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_pool.images.image_source import this_architecture

BUSYBOX = shutil.which("busybox")


def entry(name: str, kind: bytes = tarfile.REGTYPE, data: bytes = b"", **facts: Any) -> tuple[tarfile.TarInfo, bytes]:
    """One member of a layer; attributes with `xattrs={name: value}`."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(data)
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for attribute, value in facts.pop("xattrs", {}).items():
        info.pax_headers[f"SCHILY.xattr.{attribute}"] = value
    for key, value in facts.items():
        setattr(info, key, value)
    return info, data


def folder(name: str, **facts: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, tarfile.DIRTYPE, **facts)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind, linkname=target)


def pack(entries: Iterable[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.PAX_FORMAT) -> bytes:
    """A plain layer."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, errors="surrogateescape") as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def busybox() -> bytes:
    """The static program."""
    assert BUSYBOX is not None
    return Path(BUSYBOX).read_bytes()


def base_layer() -> bytes:
    """busybox with its usual names: a whole system in one static program, without bash."""
    names = ("sh", "ls", "cat", "id", "echo", "env", "pwd", "stat", "mkdir", "rm", "sleep", "touch", "head", "grep")
    return pack(
        [
            folder("bin"),
            entry("bin/busybox", data=busybox(), mode=0o755),
            *(link(f"bin/{name}", "busybox") for name in names),
            folder("etc"),
            entry("etc/passwd", data=b"root:x:0:0::/root:/bin/sh\napp:x:1234:1235::/home/app:/bin/sh\n"),
            entry("etc/group", data=b"root:x:0:\napp:x:1235:\nextra:x:777:app\n"),
            folder("app", uid=1234, gid=1235),
            entry("app/main.py", data=b"print('hi')\n", uid=1234, gid=1235),
        ]
    )


def _gzip(data: bytes) -> bytes:
    """The same bytes every time: digests are compared."""
    return gzip.compress(data, mtime=0)


@dataclass
class Made:
    """An image in the making."""

    layers: Sequence[bytes]
    config: dict[str, Any] = field(default_factory=dict)
    architecture: str = field(default_factory=this_architecture)
    compress: Any = _gzip

    @property
    def document(self) -> bytes:
        rootfs = {"type": "layers", "diff_ids": [digest(layer) for layer in self.layers]}
        whole = {"architecture": self.architecture, "os": "linux", "config": self.config, "rootfs": rootfs}
        return json.dumps(whole).encode()

    def manifest(self) -> tuple[bytes, dict[str, bytes]]:
        """The manifest, and every blob it names by digest."""
        blobs = {digest(self.document): self.document}
        described = []
        for layer in self.layers:
            blob = self.compress(layer)
            blobs[digest(blob)] = blob
            kind = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if self.compress is _gzip else "")
            described.append({"mediaType": kind, "digest": digest(blob), "size": len(blob)})
        config = {"digest": digest(self.document), "size": len(self.document)}
        config["mediaType"] = "application/vnd.oci.image.config.v1+json"
        kind = "application/vnd.oci.image.manifest.v1+json"
        whole = {"schemaVersion": 2, "mediaType": kind, "config": config, "layers": described}
        return json.dumps(whole).encode(), blobs

    def layout(self, path: Path, tag: str = "latest") -> str:
        """Add it to an OCI layout; the image's name."""
        blobs = path / "blobs/sha256"
        blobs.mkdir(parents=True, exist_ok=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        manifest, parts = self.manifest()
        for name, data in {**parts, digest(manifest): manifest}.items():
            (blobs / name[7:]).write_bytes(data)
        index = path / "index.json"
        entries = json.loads(index.read_text())["manifests"] if index.exists() else []
        described = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": digest(manifest)}
        described |= {"size": len(manifest), "annotations": {"org.opencontainers.image.ref.name": tag}}
        index.write_text(json.dumps({"schemaVersion": 2, "manifests": [*entries, described]}))
        return f"oci:{path}:{tag}"

    def docker_archive(self, path: Path) -> str:
        """What `docker save` writes."""
        names = [f"{digest(layer)[7:]}/layer.tar" for layer in self.layers]
        manifest = [{"Config": "config.json", "RepoTags": ["made:1"], "Layers": names}]
        files = {"manifest.json": json.dumps(manifest).encode(), "config.json": self.document}
        with tarfile.open(path, "w") as tar:
            for name, data in {**files, **dict(zip(names, self.layers, strict=True))}.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return f"docker-archive:{path}"

    def oci_archive(self, path: Path) -> str:
        """A layout in one file."""
        place = path.with_suffix(".layout")
        self.layout(place)
        with tarfile.open(path, "w") as tar:
            tar.add(place, arcname=".")
        return f"oci-archive:{path}"
