"""`dockerfile:` images, built by real engines and run in slots of this machine."""

import os

import pytest

from sandbox_pool import PoolConfig, SandboxSpec, SlotPool
from sandbox_pool.config import ImageSettings
from sandbox_pool.images import dockerfile
from support.container_engines import PATH
from support.image_layouts import BUSYBOX, busybox

pytestmark = [pytest.mark.ci, pytest.mark.timeout(300), pytest.mark.skipif(BUSYBOX is None, reason="no busybox")]
TEXT = "FROM scratch\nCOPY busybox /bin/\nCOPY a.txt /app/\nENV GREETING=hi\nWORKDIR /app\n"


@pytest.fixture
def asks(engine, tmp_path, monkeypatch):
    """The engine's own command finds that engine, and nothing else is asked."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / engine.kind
    program, *words = engine.command
    quoted = " ".join(f"'{word}'" for word in [program, *words])
    command.write_text(f'#!/bin/sh\nPATH="{PATH}" exec {quoted} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(dockerfile, "ENGINES", (engine.kind,))
    for name, value in engine.environment.items():
        monkeypatch.setenv(name, value)


async def test_a_dockerfile_is_built_and_its_slot_is_the_image(engine, asks, tmp_path, monkeypatch):
    monkeypatch.setattr("sandbox_pool.images.supply.cache_dir", lambda: tmp_path / "cache")
    context = tmp_path / "context"
    context.mkdir()
    (context / "busybox").write_bytes(busybox())
    (context / "busybox").chmod(0o755)
    (context / "a.txt").write_text("of the file\n")
    (context / "Dockerfile").write_text(TEXT)
    before = engine.run("images", "--quiet")
    images = ImageSettings(store_dir=tmp_path / "store")
    config = PoolConfig(slots_per_host=1, max_hosts=1, state_dir=tmp_path / "state", images=images)
    spec = SandboxSpec(image=f"dockerfile:{context}")
    async with SlotPool.from_config(config) as pool, pool.lease("t", spec) as box:
        assert (await box.exec("pwd; echo $GREETING; busybox cat a.txt")).output == "/app\nhi\nof the file\n"
    assert engine.run("images", "--quiet") == before
