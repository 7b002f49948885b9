"""`dockerfile:` images: the engine that works is found, and what all say is told when none does.

Real engines build them in tests/live/docker.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_pool.config import ImageSettings
from sandbox_pool.errors import ImageError
from sandbox_pool.images.supply import Images
from support.image_layouts import Made, entry, pack


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a Dockerfile, and nothing to build it with."""
    (tmp_path / "context").mkdir()
    (tmp_path / "context/Dockerfile").write_text("FROM scratch\n")
    (tmp_path / "bin").mkdir()
    return tmp_path / "context"


@pytest.fixture
def programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines are put that are all there are."""
    monkeypatch.setenv("PATH", str(folder.parent / "bin"))
    return folder.parent / "bin"


def put(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


async def find(folder: Path) -> str:
    images = Images(ImageSettings(), cache=folder.parent / "cache")
    try:
        return (await images.find(f"dockerfile:{folder}")).layers[0].diff_id
    finally:
        await images.close()


async def test_an_engine_that_works_is_used_where_another_is_not_running(folder: Path, programs: Path) -> None:
    made = Made([pack([entry("a")])])
    made.docker_archive(folder.parent / "saved")
    put(programs / "docker", "echo Cannot connect to the Docker daemon; exit 1")
    put(
        programs / "podman",
        f"echo $* >>{folder.parent}/asked; [ $1 != save ] || exec /bin/cp {folder.parent}/saved $5",
    )
    assert await find(folder) == await find(folder)
    asked = (folder.parent / "asked").read_text().splitlines()
    assert [line.split()[0] for line in asked] == ["version", "build", "save", "rmi"]


async def test_where_none_works_what_each_said_is_told(folder: Path, programs: Path) -> None:
    with pytest.raises(ImageError, match="install one of docker, podman, buildah"):
        await find(folder)
    put(programs / "docker", "echo Cannot connect to the Docker daemon; exit 1")
    with pytest.raises(ImageError, match=r"none here works: `docker version` failed with 1: Cannot connect"):
        await find(folder)
