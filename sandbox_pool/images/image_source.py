"""What an image name means, and what is in the image: its configuration and its layers, from a folder or an archive.

/folder                               a root file system on the host of the slot
oci:FOLDER[:TAG], oci-archive:FILE[:TAG]   the layout of the Open Container Initiative
docker-archive:FILE                   what `docker save` and `podman save` write
dockerfile:FOLDER                     built with the engine that is here
name[:tag][@sha256:...]               at a registry, docker.io unless the name begins with another
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import platform
import re
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandbox_pool.errors import ImageError

Json = dict[str, Any]
Blob = Callable[[], AsyncIterator[bytes]]
LOCAL_KINDS = ("oci", "oci-archive", "docker-archive", "dockerfile")
PIECE = 1 << 20
MAX_DOCUMENT = 16 << 20
"""Bytes of a manifest or configuration."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
_NAME = re.compile(r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*)*\Z")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")
_HOST = re.compile(r"(?:\[[0-9a-fA-F:]+\]|[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?)(?::[0-9]+)?\Z")
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "arm", "i686": "386"}


@dataclass(frozen=True)
class Layer:
    """One layer of an image."""

    diff_id: str
    """Digest of the plain archive: what a host keeps it by."""
    digest: str | None
    """Digest of the blob as it is stored; None when only the plain one is known."""
    size: int
    blob: Blob = field(compare=False, repr=False)


@dataclass(frozen=True)
class Image:
    """What a slot is made from."""

    name: str
    digest: str
    """Of its configuration, which names all layers: the same content has the same one."""
    layers: tuple[Layer, ...]
    """Lowest first."""
    env: dict[str, str]
    workdir: str
    user: str

    def on_wire(self) -> Json:
        """As a slot server is told of it."""
        return {
            "key": self.digest,
            "layers": [layer.diff_id for layer in self.layers],
            "env": self.env,
            "workdir": self.workdir,
            "user": self.user,
        }


@dataclass(frozen=True)
class Reference:
    """An image at a registry."""

    host: str
    name: str
    tag: str
    digest: str | None = None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """As `docker pull` reads it; ImageError says what is wrong with it."""
        rest, _, digest = text.partition("@")
        if "@" in digest or (digest and not _DIGEST.match(digest)):
            # A password in a name would end up in logs and journals.
            raise ImageError(f"the image {_masked(text)!r} is followed by something that is not @sha256:<64 digits>")
        first, slash, more = rest.partition("/")
        named_host = bool(slash) and ("." in first or ":" in first or first == "localhost")
        host, path = (first, more) if named_host else ("docker.io", rest)
        path, colon, tag = path.partition(":")
        if host in ("index.docker.io", "registry-1.docker.io"):
            host = "docker.io"
        if host == "docker.io" and "/" not in path:
            path = f"library/{path}"
        if not _HOST.match(host) or not _NAME.match(path) or (colon and not _TAG.match(tag)):
            raise ImageError(f"{_masked(text)!r} is not the name of an image")
        return cls(host, path, tag or "latest", digest or None)

    def __str__(self) -> str:
        return f"{self.host}/{self.name}" + (f"@{self.digest}" if self.digest else f":{self.tag}")


def _masked(text: str) -> str:
    """Without what stands before an `@` that is not a digest's: it may be a password."""
    head, at, tail = text.rpartition("@")
    return f"...@{tail}" if at and ":" in head and not tail.startswith("sha256:") else text


def is_folder(name: str) -> bool:
    """Whether the name is a folder on the host itself, which is used as it is."""
    return name.startswith("/")


def is_for_slots(name: str) -> bool:
    """Whether only slots can have this image: no container engine and no cloud could run a host in it."""
    return is_folder(name) or name.startswith(("oci:", "oci-archive:", "docker-archive:"))


def kind_of(name: str) -> tuple[str, str]:
    """(kind, rest) of a name; the kind is `registry` for a reference."""
    word, colon, rest = name.partition(":")
    if colon and word in LOCAL_KINDS:
        if not rest:
            raise ImageError(f"the image {name!r} names nothing: `{word}:` is followed by a path")
        return word, rest
    return "registry", name


def check_name(name: str) -> None:
    """Raise ImageError for what cannot be an image, before anything is started for it."""
    if not is_folder(name) and kind_of(name)[0] == "registry":
        Reference.parse(name)


def this_architecture() -> str:
    """As images name it."""
    return ARCHITECTURES.get(platform.machine(), platform.machine())


def choose_platform(manifests: list[Json], what: str) -> Json:
    """The entry of a manifest list that runs here."""
    wanted = this_architecture()
    usable = []
    for entry in manifests:
        place = entry.get("platform") or {}
        if place.get("os", "linux") == "linux" and place.get("architecture", wanted) == wanted:
            usable.append(entry)
    if not usable:
        there = sorted({str((entry.get("platform") or {}).get("architecture")) for entry in manifests} - {"unknown"})
        raise ImageError(f"{what} has no image for linux on {wanted}, only for {', '.join(there) or 'nothing'}")
    return usable[0]


def make_image(name: str, digest: str, config: bytes, blobs: list[tuple[str | None, int, Blob]]) -> Image:
    """The image of a configuration and of the blobs of its layers, lowest first."""
    document = parse_json(config, f"the configuration of {name}")
    found = document.get("architecture")
    if found and found != this_architecture():
        raise ImageError(f"{name} is for {found}, and this machine is {this_architecture()}")
    diff_ids = (document.get("rootfs") or {}).get("diff_ids") or []
    if len(diff_ids) != len(blobs) or not all(isinstance(each, str) and _DIGEST.match(each) for each in diff_ids):
        raise ImageError(f"{name} is damaged: {len(blobs)} layers, and its configuration names {len(diff_ids)}")
    settings = document.get("config") or {}
    env = dict(text.partition("=")[::2] for text in settings.get("Env") or [] if "=" in text)
    layers = tuple(Layer(diff_ids[i], *blobs[i]) for i in range(len(blobs)))
    return Image(name, digest, layers, env, settings.get("WorkingDir") or "", settings.get("User") or "")


def parse_json(data: bytes, what: str) -> Json:
    """An object; ImageError otherwise."""
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ImageError(f"{what} cannot be read")
    return value


def check_digest(data: bytes, digest: str, what: str) -> bytes:
    """The data, if it has this digest."""
    found = f"sha256:{hashlib.sha256(data).hexdigest()}"
    if found != digest:
        raise ImageError(f"{what} has the digest {found[:23]}..., not {digest[:23]}...")
    return data


class FolderFiles:
    """Files of a layout that is a folder."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, name: str) -> bytes:
        """A small file."""
        with (self._path / name).open("rb") as file:
            return file.read(MAX_DOCUMENT)

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return (self._path / name).stat().st_size

    def pieces(self, name: str) -> Iterator[bytes]:
        """A large file."""
        with (self._path / name).open("rb") as file:
            while data := file.read(PIECE):
                yield data


class ArchiveFiles:
    """Files of a layout that is a tar archive."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with tarfile.open(path) as archive:
            self._members = {member.name.removeprefix("./"): member for member in archive}

    def _member(self, name: str) -> tarfile.TarInfo:
        member = self._members.get(name)
        for _ in range(5):  # older writers store a layer once and link to it
            if member is None or not (member.issym() or member.islnk()):
                break
            folder = "" if member.islnk() else member.name.removeprefix("./").rpartition("/")[0]
            parts: list[str] = [part for part in folder.split("/") if part]
            for part in member.linkname.split("/"):
                if part == "..":
                    del parts[-1:]
                elif part not in ("", "."):
                    parts.append(part)
            member = self._members.get("/".join(parts))
        if member is None or not member.isfile():
            raise FileNotFoundError(2, "not in the archive", name)
        return member

    def read(self, name: str) -> bytes:
        """A small file."""
        return b"".join(self.pieces(name, MAX_DOCUMENT))

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return self._member(name).size

    def pieces(self, name: str, most: int | None = None) -> Iterator[bytes]:
        """A large file."""
        member = self._member(name)
        with tarfile.open(self._path) as archive:
            file = archive.extractfile(member)
            assert file is not None
            left = member.size if most is None else min(most, member.size)
            while data := file.read(min(PIECE, left)):
                left -= len(data)
                yield data


Files = FolderFiles | ArchiveFiles


def read_layout(name: str) -> Image:
    """The image of an `oci:`, `oci-archive:` or `docker-archive:` name. Blocks: call it in a thread."""
    kind, rest = kind_of(name)
    path, tag = _path_and_tag(rest)
    try:
        files: Files = FolderFiles(path) if kind == "oci" else ArchiveFiles(path)
        return _docker_archive(name, files) if kind == "docker-archive" else _oci_layout(name, files, tag)
    except (OSError, tarfile.TarError, EOFError, KeyError, TypeError, IndexError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        raise ImageError(f"the image {name!r} cannot be read: {reason}") from error


def _path_and_tag(text: str) -> tuple[Path, str | None]:
    whole = Path(text).expanduser()
    if whole.exists():
        return whole, None
    path, colon, tag = text.rpartition(":")
    return (Path(path).expanduser(), tag) if colon and Path(path).expanduser().exists() else (whole, None)


def _blob_name(digest: str) -> str:
    if not _DIGEST.match(digest):
        raise ImageError(f"not a sha256 digest: {digest[:100]!r}")
    return f"blobs/sha256/{digest[7:]}"


def _oci_layout(name: str, files: Files, tag: str | None) -> Image:
    entries = parse_json(files.read("index.json"), f"the index of {name}")["manifests"]
    tags = {str((entry.get("annotations") or {}).get("org.opencontainers.image.ref.name")): entry for entry in entries}
    if tag is not None:
        if tag not in tags:
            raise ImageError(f"{name!r}: the layout has no tag {tag!r}, but {', '.join(sorted(tags))}")
        entries = [tags[tag]]
    elif len(tags) > 1:
        raise ImageError(f"{name!r}: the layout has several images; name one of {', '.join(sorted(tags))}")
    digest = str(choose_platform(entries, name)["digest"])
    manifest = parse_json(check_digest(files.read(_blob_name(digest)), digest, name), f"the manifest of {name}")
    if "manifests" in manifest:
        digest = str(choose_platform(manifest["manifests"], name)["digest"])
        manifest = parse_json(check_digest(files.read(_blob_name(digest)), digest, name), f"the manifest of {name}")
    config = str(manifest["config"]["digest"])
    data = check_digest(files.read(_blob_name(config)), config, f"the configuration of {name}")
    blobs: list[tuple[str | None, int, Blob]] = [
        (str(layer["digest"]), files.size(_blob_name(layer["digest"])), file_blob(files, _blob_name(layer["digest"])))
        for layer in manifest["layers"]
    ]
    return make_image(name, config, data, blobs)


def _docker_archive(name: str, files: Files) -> Image:
    documents = json.loads(files.read("manifest.json"))
    if len(documents) != 1:
        raise ImageError(f"{name!r}: the archive has {len(documents)} images; save one alone")
    data = files.read(documents[0]["Config"])
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    blobs: list[tuple[str | None, int, Blob]] = [
        (None, files.size(path), file_blob(files, path)) for path in documents[0]["Layers"]
    ]
    return make_image(name, digest, data, blobs)


def file_blob(files: Files, name: str) -> Blob:
    """A file of a layout as a stream, read in threads."""

    async def stream() -> AsyncIterator[bytes]:
        pieces = files.pieces(name)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    return stream
