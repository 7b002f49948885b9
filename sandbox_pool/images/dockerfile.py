"""Builds `dockerfile:FOLDER` images with the engine that is on this machine; the same content is built once."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandbox_pool.errors import ImageError

ENGINES = ("docker", "podman", "buildah")
OUTPUT_TAIL = 2000


async def build(path: Path, cache: Path) -> Path:
    """An archive as `docker save` writes it. `path` is a Dockerfile or the folder around one."""
    dockerfile = path / "Dockerfile" if path.is_dir() else path
    if not dockerfile.is_file():
        raise ImageError(f"there is no Dockerfile at {str(path)!r}")
    key = await asyncio.to_thread(_content_of, dockerfile.parent, dockerfile.name)
    archive = cache / f"{key}.saved.tar"
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _alone(cache / f"{key}.lock") as lock:
        await asyncio.to_thread(fcntl.flock, lock, fcntl.LOCK_EX)
        if not archive.exists():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                draft = Path(work) / "image.tar"
                await _build(dockerfile, f"localhost/hermes-rl-built:{key[:24]}", draft)
                draft.rename(archive)
    return archive


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _content_of(folder: Path, name: str) -> str:
    """A hash of all that a build can see: names, kinds, modes, content."""
    digest = hashlib.sha256(name.encode())
    for path in sorted(folder.rglob("*")):
        info = path.lstat()
        digest.update(f"{path.relative_to(folder)}\0{info.st_mode:o}\0".encode("utf-8", "surrogateescape"))
        if path.is_symlink():
            digest.update(os.fsencode(path.readlink()))
        elif path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


async def _engine() -> str:
    """The first one that answers: docker's command may be here without the engine that it asks."""
    problems = []
    for name in ENGINES:
        if shutil.which(name):
            try:
                await _run([name, "version"])
            except ImageError as error:
                problems.append(str(error))
            else:
                return name
    names = ", ".join(ENGINES)
    if problems:
        raise ImageError(f"a Dockerfile needs one of {names}, and none here works: {'; '.join(problems)}")
    raise ImageError(f"a Dockerfile needs an engine: install one of {names}, or name a built image")


async def _build(dockerfile: Path, tag: str, archive: Path) -> None:
    engine = await _engine()
    words = ["bud" if engine == "buildah" else "build", "-t", tag, "-f", str(dockerfile), str(dockerfile.parent)]
    await _run([engine, *words])
    if engine == "docker":  # writes a layout of the OCI as well from version 25 on
        await _run(["docker", "save", "-o", str(archive), tag])
    elif engine == "podman":
        await _run(["podman", "save", "--format", "docker-archive", "-o", str(archive), tag])
    else:
        await _run(["buildah", "push", tag, f"docker-archive:{archive}:{tag}"])
    await _run([engine, "rmi", tag], check=False)


async def _run(command: list[str], *, check: bool = True) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        out, _ = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if check and process.returncode:
        tail = out.decode("utf-8", "replace").strip()[-OUTPUT_TAIL:]
        raise ImageError(f"`{' '.join(command[:2])}` failed with {process.returncode}: {tail}")
