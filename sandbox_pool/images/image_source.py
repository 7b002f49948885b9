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
import platform
import re
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from sandbox_pool.errors import ImageError

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


Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Text = Annotated[str, Field(pattern=r"^[^\x00]*$")]


class Platform(BaseModel):
    """What an image runs on."""

    os: str = "linux"
    architecture: str | None = None


class Described(BaseModel):
    """A blob, as a manifest names it. Its digest becomes the name of a file, so it is a digest or refused."""

    digest: Digest
    size: int | None = Field(None, ge=0)
    platform: Platform | None = None
    annotations: dict[str, str] | None = None


class Manifest(BaseModel):
    """A manifest, or a list of them."""

    manifests: list[Described] | None = None
    config: Described | None = None
    layers: list[Described] | None = None


class Settings(BaseModel):
    """What an image says of the programs in it."""

    env: list[Text] | None = Field(None, alias="Env")
    working_dir: Text | None = Field(None, alias="WorkingDir")
    user: Text | None = Field(None, alias="User")


class RootFs(BaseModel):
    """The layers, by the digests of their plain archives."""

    diff_ids: list[Digest] | None = None


class Configuration(BaseModel):
    """The document that names all of an image."""

    architecture: str | None = None
    rootfs: RootFs | None = None
    config: Settings | None = None


class Saved(BaseModel):
    """An image in an archive of `docker save`."""

    config: str = Field(alias="Config")
    layers: list[str] = Field(alias="Layers")


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

    def on_wire(self) -> dict[str, Any]:
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


def choose_platform(manifests: list[Described], what: str) -> Described:
    """The entry of a manifest list that runs here."""
    wanted = this_architecture()
    platforms = [entry.platform or Platform() for entry in manifests]
    for entry, place in zip(manifests, platforms, strict=True):
        if place.os == "linux" and (place.architecture or wanted) == wanted:
            return entry
    there = sorted({str(place.architecture) for place in platforms} - {"unknown"})
    raise ImageError(f"{what} has no image for linux on {wanted}, only for {', '.join(there) or 'nothing'}")


def make_image(name: str, digest: str, config: bytes, blobs: list[tuple[str | None, int, Blob]]) -> Image:
    """The image of a configuration and of the blobs of its layers, lowest first."""
    document = parse_document(Configuration, config, f"the configuration of {name}")
    found = document.architecture
    if found and found != this_architecture():
        raise ImageError(f"{name} is for {found}, and this machine is {this_architecture()}")
    diff_ids = (document.rootfs or RootFs()).diff_ids or []
    if len(diff_ids) != len(blobs):
        raise ImageError(f"{name} is damaged: {len(blobs)} layers, and its configuration names {len(diff_ids)}")
    settings = document.config or Settings.model_validate({})
    env = dict(text.partition("=")[::2] for text in settings.env or [] if text.find("=") > 0)
    layers = tuple(Layer(diff_ids[i], *blobs[i]) for i in range(len(blobs)))
    return Image(name, digest, layers, env, settings.working_dir or "", settings.user or "")


Model = TypeVar("Model")


def parse_document(kind: type[Model], data: bytes, what: str) -> Model:
    """A document of an image, which comes from anywhere; ImageError says what is wrong with it."""
    try:
        return TypeAdapter(kind).validate_json(data)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise ImageError(f"{what} cannot be read: {f'{place}: ' if place else ''}{wrong['msg']}") from None


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
    except (OSError, tarfile.TarError, EOFError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
        raise ImageError(f"the image {name!r} cannot be read: {reason}") from error


def _path_and_tag(text: str) -> tuple[Path, str | None]:
    whole = Path(text).expanduser()
    if whole.exists():
        return whole, None
    path, colon, tag = text.rpartition(":")
    return (Path(path).expanduser(), tag) if colon and Path(path).expanduser().exists() else (whole, None)


def _blob_name(digest: str) -> str:
    return f"blobs/sha256/{digest[7:]}"


def _manifest(name: str, files: Files, digest: str) -> Manifest:
    data = check_digest(files.read(_blob_name(digest)), digest, name)
    return parse_document(Manifest, data, f"the manifest of {name}")


def _oci_layout(name: str, files: Files, tag: str | None) -> Image:
    entries = parse_document(Manifest, files.read("index.json"), f"the index of {name}").manifests or []
    tags = {str((entry.annotations or {}).get("org.opencontainers.image.ref.name")): entry for entry in entries}
    if tag is not None:
        if tag not in tags:
            raise ImageError(f"{name!r}: the layout has no tag {tag!r}, but {', '.join(sorted(tags))}")
        entries = [tags[tag]]
    elif len(tags) > 1:
        raise ImageError(f"{name!r}: the layout has several images; name one of {', '.join(sorted(tags))}")
    manifest = _manifest(name, files, choose_platform(entries, name).digest)
    if manifest.manifests is not None:
        manifest = _manifest(name, files, choose_platform(manifest.manifests, name).digest)
    if manifest.config is None or manifest.layers is None:
        raise ImageError(f"{name} has a manifest of a kind that is no longer used")
    config = manifest.config.digest
    data = check_digest(files.read(_blob_name(config)), config, f"the configuration of {name}")
    blobs: list[tuple[str | None, int, Blob]] = [
        (layer.digest, files.size(_blob_name(layer.digest)), file_blob(files, _blob_name(layer.digest)))
        for layer in manifest.layers
    ]
    return make_image(name, config, data, blobs)


def _docker_archive(name: str, files: Files) -> Image:
    documents = parse_document(list[Saved], files.read("manifest.json"), f"the list of {name}")
    if len(documents) != 1:
        raise ImageError(f"{name!r}: the archive has {len(documents)} images; save one alone")
    data = files.read(documents[0].config)
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    blobs: list[tuple[str | None, int, Blob]] = [
        (None, files.size(path), file_blob(files, path)) for path in documents[0].layers
    ]
    return make_image(name, digest, data, blobs)


def file_blob(files: Files, name: str) -> Blob:
    """A file of a layout as a stream, read in threads."""

    async def stream() -> AsyncIterator[bytes]:
        pieces = files.pieces(name)
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            yield piece

    return stream
