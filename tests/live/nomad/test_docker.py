"""The docker driver, live, on an engine of our own: unprivileged by default, namespaces when the capability is given.

With namespaces a spec that names the image of its host has the container's whole root, its ENV and its WORKDIR.
"""

import json
import shutil
import tempfile
from pathlib import Path

import pytest

from sandbox_pool import SandboxSpec, SlotPool
from sandbox_pool.conformance import all_checks, run_checks
from sandbox_pool.conformance.runner import make_context
from sandbox_pool.errors import ImageError
from support.container_engines import app_image, docker
from support.containers import Unavailable
from support.nomad_agent import Agent

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CAPABLE = {"cap_add": ["sys_admin"]}
DRIVER = {"driver": "docker", "memory_mb": 3000}


@pytest.fixture(scope="module")
def engine():
    try:
        with docker() as started:
            yield started
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def image(engine):
    try:
        return app_image(engine)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def shared_agent(engine):
    """In place of the session's, which knows no engine."""
    folder = Path(tempfile.mkdtemp(prefix="hrl-nomad-"))
    folder.chmod(0o711)
    agent = Agent(folder / "agent", docker_host=engine.host).start()
    try:
        agent.wait_ready()
        agent.pool_secret = agent.pool_token()
        yield agent
    finally:
        agent.close()
        shutil.rmtree(folder, ignore_errors=True)


def containers(engine):
    ids = engine.run("ps", "--all", "--quiet").split()
    return json.loads(engine.run("inspect", *ids)) if ids else []


@pytest.mark.parametrize("options", [{}, CAPABLE], ids=["unprivileged", "with a capability"])
async def test_docker_keeps_every_promise_of_its_level(make_config, engine, cluster, image, options):
    config = make_config({**DRIVER, "image": image, **options}, slots_per_host=16)
    async with SlotPool.from_config(config) as pool:
        context = await make_context(pool)
        assert context.info.isolation == ("namespaces" if options else "landlock")
        (container,) = await cluster(containers, engine)
        assert container["HostConfig"]["Privileged"] is False
        assert container["HostConfig"]["Memory"] == 3000 << 20
        results = [result async for result in run_checks(all_checks(), context)]
        context.close()
    assert {each.id: each.detail for each in results if each.verdict == "failed"} == {}
    assert sum(each.verdict == "passed" for each in results) >= 60
    assert await cluster(containers, engine) == []


async def test_a_spec_that_names_the_image_gets_its_whole_root_env_and_workdir(make_config, image):
    config = make_config({**DRIVER, **CAPABLE}, spec=SandboxSpec(image=image), min_hosts=0)
    async with SlotPool.from_config(config) as pool:
        async with pool.lease("t", timeout_s=120) as box:
            ran = await box.exec(
                "pwd; echo $GREETING; hello; id -u; cat data.txt /root/.profile-of-image; stat -c %u:%g data.txt"
            )
            assert ran.output.split("\n") == ["/testbed", "hi", "hello", "0", "of the image", "x1234:8", ""]
            assert "NOMAD" not in (await box.exec("env; cat /proc/1/environ")).output
            # The engine leaves the folders that Nomad's were mounted on.
            assert (await box.exec("find /secrets /local /alloc -mindepth 1")).output == ""
            await box.write_file("data.txt", b"changed")
            snapshot = await box.snapshot()
        async with pool.lease("u") as box:
            assert (await box.exec("cat data.txt")).output == "of the image\n"
        async with pool.lease_from(snapshot, "v") as box:
            assert (await box.exec("pwd; cat data.txt; hello")).output == "/testbed\nchangedhello\n"
        async with pool.lease("w", SandboxSpec(image=image, user="app:mail")) as box:
            assert (await box.exec("id -un; id -gn; echo $HOME")).output == "app\nmail\n/testbed\n"


async def test_every_promise_is_kept_in_the_image(make_config, image):
    config = make_config({**DRIVER, **CAPABLE}, spec=SandboxSpec(image=image), slots_per_host=16)
    async with SlotPool.from_config(config) as pool:
        context = await make_context(pool)
        results = [result async for result in run_checks(all_checks(), context)]
        context.close()
    assert context.info.isolation == "namespaces"
    assert {each.id: each.detail for each in results if each.verdict == "failed"} == {}
    assert sum(each.verdict == "passed" for each in results) >= 100


async def test_without_the_capability_the_image_is_refused(make_config, image):
    async with SlotPool.from_config(make_config(DRIVER, spec=SandboxSpec(image=image))) as pool:
        with pytest.raises(ImageError, match="SYS_ADMIN"):
            await pool.acquire("t", timeout_s=120)
