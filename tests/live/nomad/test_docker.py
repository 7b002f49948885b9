"""The docker driver, live, when an engine runs: unprivileged by default, namespaces when the capabilities are given.

The image is HERMES_RL_DOCKER_IMAGE, or made here from a debootstrap root; the slot server comes from the pool.
"""

import json
import os
import shutil
import subprocess

import pytest

from sandbox_pool import SandboxSpec, SlotPool
from sandbox_pool.conformance import all_checks, run_checks
from sandbox_pool.conformance.runner import make_context

IMAGE = "hermes-rl-test:debootstrap"
PACKAGES = "python3-minimal,libpython3-stdlib,procps"
CAPABLE = {"cap_add": ["sys_admin", "net_admin"]}


def docker(*arguments, check=True, **options):
    done = subprocess.run(["docker", *arguments], check=check, capture_output=True, text=True, timeout=60, **options)
    return done.stdout.strip() if check else done.returncode


def no_engine():
    if shutil.which("docker") is None or docker("info", check=False) != 0:
        return "no Docker engine runs here"
    return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(no_engine() is not None, reason=str(no_engine())),
]


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    given = os.environ.get("HERMES_RL_DOCKER_IMAGE", IMAGE)
    if docker("image", "inspect", given, check=False) == 0:
        return given
    if given != IMAGE or shutil.which("debootstrap") is None or os.getuid() != 0:
        pytest.skip(f"there is no image {given!r}, and it can be made only by root with debootstrap")
    root = tmp_path_factory.mktemp("root")
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
    if subprocess.run(command, capture_output=True, check=False, timeout=500).returncode != 0:
        pytest.skip("debootstrap found no mirror")
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packed:
        docker("import", "-", IMAGE, stdin=packed.stdout)
    shutil.rmtree(root, ignore_errors=True)
    return IMAGE


def containers(agent):
    """Containers of this agent's allocations, as the engine describes them."""
    ids = docker("ps", "-aq").split()
    found = json.loads(docker("inspect", *ids)) if ids else []
    return [each for each in found if any(str(agent.data) in bind for bind in each["HostConfig"]["Binds"] or [])]


@pytest.mark.parametrize("options", [{}, CAPABLE], ids=["unprivileged", "with capabilities"])
async def test_docker_keeps_every_promise_of_its_level(make_config, agent, cluster, image, options):
    config = make_config({"driver": "docker", "image": image, "memory_mb": 3000, **options}, slots_per_host=16)
    async with SlotPool.from_config(config) as pool:
        context = await make_context(pool)
        assert context.info.isolation == ("namespaces" if options else "landlock")
        (container,) = await cluster(containers, agent)
        assert container["HostConfig"]["Privileged"] is False
        assert container["HostConfig"]["Memory"] == 3000 << 20
        results = [result async for result in run_checks(all_checks(), context)]
        context.close()
    assert {each.id: each.detail for each in results if each.verdict == "failed"} == {}
    assert sum(each.verdict == "passed" for each in results) >= 60
    assert await cluster(containers, agent) == []


async def test_a_spec_may_name_the_image_of_its_hosts(make_config, image):
    config = make_config({"driver": "docker", **CAPABLE}, spec=SandboxSpec(image=image), min_hosts=0)
    async with SlotPool.from_config(config) as pool, pool.lease("t", timeout_s=60) as box:
        assert "Debian" in (await box.exec("cat /etc/os-release; ls -A /boot /home /root")).output
        assert "NOMAD" not in (await box.exec("env")).output
